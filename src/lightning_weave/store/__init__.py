"""Everything that a run keeps on disk: shards, manifests, fingerprints, locks and logs."""

from lightning_weave.store.files import (
    TEMPORARY,
    append_line,
    file_identities,
    file_identity,
    fingerprint,
    lock_run,
    make_directory,
    model_identity,
    read_checked,
    read_json,
    read_lines,
    remove,
    whole_directory,
    write_atomic,
    write_checked,
    write_json,
)
from lightning_weave.store.stage import (
    BEGUN,
    FOLDER,
    MANIFEST,
    RowIndex,
    Shard,
    Stage,
    State,
    damaged_files,
    differences,
    read_description,
    read_manifest,
)
