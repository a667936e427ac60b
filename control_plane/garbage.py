"""What a hand has left at a replica id: unreadable, under no lease, and no instance's.

Nothing else would ever end it, since only a lease or its holder ends a claim; the id would be lost for good. A record
that a hand has overwritten while its instance lives is not garbage: the next beat writes it again, and the index entry
says whose it is.
"""

from __future__ import annotations

from typing import Final

from control_plane import codec
from control_plane.etcd import EtcdClient, KeyValue, mod_revision_is, op_delete
from control_plane.keys import Keys, ReplicaKey
from omnicore.log import get_logger

_log = get_logger(__name__)

_PAGE: Final = 1000


async def clear_garbage(client: EtcdClient, keys: Keys, key: ReplicaKey, kv: KeyValue) -> bool:
    """Delete ``kv``, which is at ``key``, if it is garbage, and unless it changes meanwhile. True if it is gone."""
    if kv.lease_id or _is_readable(kv, key) or await _is_held(client, keys, key):
        return False
    result = await client.txn([mod_revision_is(kv.key, kv.mod_revision)], [op_delete(kv.key)])
    if result.succeeded:
        _log.warning("unreadable key that is nobody's removed", key=kv.key, value=repr(kv.value[:100]))
    return result.succeeded


def _is_readable(kv: KeyValue, key: ReplicaKey) -> bool:
    try:
        codec.decode_replica(kv.value, key, kv.create_revision)
    except codec.RecordError:
        return False
    return True


async def _is_held(client: EtcdClient, keys: Keys, key: ReplicaKey) -> bool:
    """Whether an instance has this id. Looks through all of them, for what is rare."""
    after, more = "", True
    while more:
        page = await client.get_prefix(keys.instances, limit=_PAGE, after=after)
        for kv in page.kvs:
            try:
                if codec.decode_claim(kv.value) == key:
                    return True
            except codec.RecordError as error:
                _log.warning("unreadable claim", key=kv.key, error=error)
        after, more = page.kvs[-1].key if page.kvs else "", page.more
    return False
