"""What one run is made of: its steps, its models at work, and how its shards are made."""
