"""Plain PyTorch definition of kv_stage."""

from __future__ import annotations

from torch import Tensor


def check_arguments(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Raises ValueError for arguments that kv_stage cannot take. Slots are checked on the CPU only."""
    pages, page_size = key_cache.shape[:2]
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if new.dtype != cache.dtype or new.shape[1:] != cache.shape[2:] or new.shape[0] != slots.shape[0]:
            raise ValueError(
                f"kv_stage: {name} is {new.dtype} {list(new.shape)}, expected {cache.dtype} "
                f"{[slots.shape[0], *cache.shape[2:]]} (one entry per slot, heads and width of its cache)"
            )
    if slots.numel() and pages * page_size == 0:
        raise ValueError(
            f"kv_stage: key_cache is {list(key_cache.shape)}, which has no slots; expected at least one page, "
            "whose slot 0 is the trash; allocate the cache first"
        )
    if slots.device.type == "cpu" and slots.numel() and int(slots.max()) >= pages * page_size:
        raise ValueError(
            f"kv_stage: slot {int(slots.max())} is outside the cache, expected less than {pages * page_size}"
        )


def kv_stage(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Writes the keys and values of M nodes of one layer into their slots of a paged cache, in place.

    The caches and the new entries have one dtype, any. Their node, page, slot and head axes may be strided; the last
    axis is contiguous.

    Args:
        key: New keys, [M, Hkv, D].
        value: New values, [M, Hkv, D].
        key_cache: Keys of the layer, [pages, page_size, Hkv, D].
        value_cache: Values of the layer, [pages, page_size, Hkv, D].
        slots: Slot of each node, page * page_size + offset, int64 [M]. A negative slot sends the node to the trash,
            slot 0 of page 0.

    Raises:
        ValueError: If shapes or dtypes do not fit, or a slot is beyond the cache.
    """
    check_arguments(key, value, key_cache, value_cache, slots)
    page_size = key_cache.shape[1]
    where = slots.clamp(min=0)
    page, offset = where // page_size, where % page_size
    key_cache[page, offset] = key
    value_cache[page, offset] = value
