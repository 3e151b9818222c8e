"""Everything that a run keeps on disk: shards, manifests, fingerprints, locks and logs."""

from lightning_weave.store.files import (
    TEMPORARY,
    append_line,
    lock_run,
    make_directory,
    read_json,
    read_lines,
    remove,
    whole_directory,
    write_atomic,
    write_json,
)
from lightning_weave.store.identity import (
    RunIdentities,
    file_identities,
    file_identity,
    fingerprint,
    model_identity,
    read_checked,
    write_checked,
)
from lightning_weave.store.shards import RowIndex, Shard
from lightning_weave.store.stage import (
    BEGUN,
    MANIFEST,
    Stage,
    State,
    damaged_files,
    differences,
    read_description,
    read_manifest,
)
