"""Everything that a run keeps on disk: shards, manifests, fingerprints, locks and logs."""

from lightning_weave.store.files import (
    TEMPORARY,
    append_line,
    make_directory,
    read_json,
    read_lines,
    remove,
    whole_directory,
    write_atomic,
    write_json,
)
from lightning_weave.store.identity import RunIdentities, file_identities, file_identity, fingerprint, model_identity
from lightning_weave.store.lock import lock_run
from lightning_weave.store.rows import RowIndex
from lightning_weave.store.run import ASIDE, MANIFEST, Stage, State, Step, Store, differences, recorded
from lightning_weave.store.shards import Shard
