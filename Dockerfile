FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap git && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir -c constraints.txt .
WORKDIR /work
ENTRYPOINT []
CMD ["lweave", "--help"]
