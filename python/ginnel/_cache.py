"""The class :class:`Cache`."""

import ctypes
import threading
from ctypes import byref, c_size_t, c_uint64, c_void_p, create_string_buffer
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, TypeVar, Union

from . import _library as lib
from ._library import cache_get as _get
from ._library import check, failure

#: Text is encoded as UTF-8.
Key = Union[bytes, str]
Value = Union[bytes, bytearray, memoryview, str]
K = TypeVar("K", bytes, str)
D = TypeVar("D")

#: Initial size of the buffer, in bytes. A longer value needs a second call.
ROOM = 16 << 10
#: A buffer larger than this is replaced by a small one after use. Also the most bytes that one call stores.
MOST_ROOM = 4 << 20
#: The most keys of one call to the library.
TOGETHER = 1024


class Item(NamedTuple):
    """A value with its properties."""

    value: bytes
    #: The client's flags, as they were stored.
    flags: int
    #: Version of the item, for :meth:`Cache.cas`.
    cas: int


class Counters(NamedTuple):
    """Counters of a :class:`Cache` since it was opened."""

    #: Number of items that were found in memory.
    hits: int
    #: Number of keys for which memory has no item.
    misses: int
    #: Number of keys that were looked up at the server, because memory could not tell.
    asked: int
    #: Number of requests whose answers were lost.
    lost: int
    #: Number of connections that were opened to servers.
    connections: int
    #: Number of keys whose hits were reported to the server.
    reported: int


class _Room(threading.local):
    """A thread's own buffer for values, with the arguments that each call needs."""

    def __init__(self, handle: int) -> None:
        self.handle = c_void_p(handle)
        self.item = lib.Item(size=ctypes.sizeof(lib.Item))
        self.item_address = c_void_p(ctypes.addressof(self.item))
        self.grow(ROOM)

    def grow(self, size: int) -> None:
        buffer = create_string_buffer(size)
        #: The arguments of the next call, and the buffer that then has the value. The buffer must live as long as its address is used.
        self.parts = (self.handle, c_void_p(ctypes.addressof(buffer)), c_size_t(size), buffer)


def _address(data: bytes) -> int:
    return ctypes.cast(data, c_void_p).value or 0


def _key(key: Key) -> bytes:
    return key.encode() if isinstance(key, str) else bytes(key)


def _value(value: Value) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class Cache:
    """An open cache.

    A get is a lookup and a copy in shared memory, and does not block if the answer can be read from memory. Changes go to the server,
    one after another, and block until it answers. When a change returns, the next get of any reader finds it, or something newer.

    Keys are bytes, or text, which is encoded as UTF-8: 1 to 250 bytes, or at most 186 if they contain blanks or control characters.
    Values are bytes, or text, which is encoded as UTF-8; a get always returns bytes. ``ttl`` is an item's time to live in seconds; 0
    means that the item does not expire.

    Several threads may use a cache. It is a context manager, and ``cache[key]`` gets, sets and removes items as a dict does.

    :param address: the cache's address, ``SEGMENT/NAME``
    :param socket: path of the daemon's socket; the default is ``$GINNEL_SOCKET`` or else ``/run/ginnel/ginnel.sock``
    :param name: name under which this program appears to people; the default is the program's name
    :param changes: where to send changes: ``"channel SEGMENT"``, ``"tcp ADDRESS:PORT"`` or ``"unix PATH"``; the default is what the
        cache itself says
    :param patience: how many seconds to wait for a cache that does not exist yet, or for a server that is being replaced
    :param timeout: how many seconds the server may take to answer

    :raises NotFound: there is no such cache, or no such segment
    :raises NoServer: the server cannot be reached; the change was not made
    :raises Lost: the server has not answered; the change may or may not have been made
    :raises TooLarge: the value is longer than an item of this cache may be
    :raises Refused: the server refuses
    :raises Error: another failure
    """

    __slots__ = ("_handle", "_room", "address")

    def __init__(
        self,
        address: str,
        *,
        socket: Optional[str] = None,
        name: Optional[str] = None,
        changes: Optional[str] = None,
        patience: float = 3.0,
        timeout: float = 10.0,
    ) -> None:
        def text(given: Optional[str]) -> Optional[bytes]:
            return None if given is None else given.encode()

        self._handle: Optional[int] = None
        self.address = address
        options = lib.Options(
            size=ctypes.sizeof(lib.Options),
            socket=text(socket),
            name=text(name),
            changes=text(changes),
            patience_ns=round(patience * 1e9) or -1,
            timeout_ns=max(round(timeout * 1e9), 1),
        )
        handle = c_void_p()
        check(lib.cache_open(address.encode(), byref(options), byref(handle)))
        self._handle = handle.value
        self._room = _Room(handle.value)

    def close(self) -> None:
        """Closes the cache. No other thread may be using it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            lib.cache_close(handle)

    def __enter__(self) -> "Cache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # When the interpreter ends, the library may be gone already; an object whose construction failed has no handle.
        if getattr(self, "_handle", None) is not None and lib is not None:
            self.close()

    def __repr__(self) -> str:
        return f"Cache({self.address!r})"

    def get(self, key: Key, default: Any = None) -> Any:
        """Returns the value of a key, or ``default`` if there is none."""
        if key.__class__ is not bytes:
            key = _key(key)
        handle, address, size, buffer = self._room.parts
        length = _get(handle, key, len(key), address, size, None)
        if length >= 0:
            return buffer[:length]
        if length == -3:
            return default
        item = self._get_item(key, length)
        return default if item is None else item.value

    def get_item(self, key: Key) -> Optional[Item]:
        """Returns the value of a key with its flags and its version, or ``None`` if there is none."""
        return self._get_item(_key(key), lib.BUFFER_TOO_SMALL)

    def _get_item(self, key: bytes, status: int) -> Optional[Item]:
        room = self._room
        while status == lib.BUFFER_TOO_SMALL:
            handle, address, size, buffer = room.parts
            status = _get(handle, key, len(key), address, size, room.item_address)
            if status == lib.BUFFER_TOO_SMALL:
                room.grow(room.item.length + 1024)
        if status == lib.NO_ITEM:
            return None
        length = check(status)
        item = Item(buffer[:length], room.item.flags, room.item.cas)
        if len(buffer) > MOST_ROOM:
            room.grow(ROOM)
        return item

    def get_many(self, keys: Iterable[K]) -> Dict[K, bytes]:
        """Returns the values of the keys that exist. It is much faster than a call of :meth:`get` for each key."""
        found: Dict[K, bytes] = {}
        todo: List[K] = list(keys)
        for begin in range(0, len(todo), TOGETHER):
            self._get_some(todo[begin : begin + TOGETHER], found)
        return found

    def _get_some(self, keys: List[K], values: Dict[K, bytes]) -> None:
        count = len(keys)
        coded = [_key(key) for key in keys]
        joined = b"".join(coded)
        at = _address(joined)
        wanted = bytearray(count * lib.KEY.size)
        pack, size_of_key = lib.KEY.pack_into, lib.KEY.size
        for number, key in enumerate(coded):
            pack(wanted, number * size_of_key, at, len(key))
            at += len(key)
        found = create_string_buffer(count * lib.FOUND.size)
        handle, address, size, buffer = self._room.parts
        check(lib.cache_get_many(handle, bytes(wanted), count, address, size, found))
        too_long = []
        for key, (status, _, _, offset, length) in zip(keys, lib.FOUND.iter_unpack(found)):
            if status == 0:
                values[key] = buffer[offset : offset + length]
            elif status == lib.BUFFER_TOO_SMALL:
                too_long.append(key)
        # Values for which there was no room are few, or large, so get them one by one.
        for key in too_long:
            item = self.get_item(key)
            if item is not None:
                values[key] = item.value

    def set(self, key: Key, value: Value, ttl: int = 0, flags: int = 0) -> int:
        """Stores a value, whether the key has one or not. Returns the item's version."""
        return self._store(lib.cache_set, key, value, ttl, flags)[1]

    def set_many(self, values: Mapping[K, Value], ttl: int = 0, flags: int = 0) -> Dict[K, lib.Error]:
        """Stores many values, without waiting for an answer before sending the next.

        Returns the keys that were not stored, each with the reason.
        """
        failed: Dict[K, lib.Error] = {}
        todo: List[Tuple[K, bytes, bytes]] = []
        size = 0
        for name, value in values.items():
            todo.append((name, _key(name), _value(value)))
            size += len(todo[-1][2])
            if len(todo) == TOGETHER or size > MOST_ROOM:
                self._set_some(todo, ttl, flags, failed)
                todo, size = [], 0
        if todo:
            self._set_some(todo, ttl, flags, failed)
        return failed

    def _set_some(self, todo: List[Tuple[K, bytes, bytes]], ttl: int, flags: int, failed: Dict[K, lib.Error]) -> None:
        # All keys and values in one buffer, so that each has an address.
        joined = b"".join([part for _, key, value in todo for part in (key, value)])
        at = _address(joined)
        entries = bytearray()
        for _, key, value in todo:
            entries += lib.ENTRY.pack(at, len(key), at + len(key), len(value), flags, ttl)
            at += len(key) + len(value)
        results = create_string_buffer(len(todo) * lib.STORED.size)
        check(lib.cache_set_many(self._handle, bytes(entries), len(todo), results))
        for (name, _, _), (status, _) in zip(todo, lib.STORED.iter_unpack(results)):
            if status < 0:
                failed[name] = lib.failure_of_one(status)

    def _store(self, function: Any, key: Key, value: Value, ttl: int, flags: int, cas: int = 0) -> Tuple[int, int]:
        key, value = _key(key), _value(value)
        version = c_uint64(cas)
        status = function(self._handle, key, len(key), value, len(value), flags, ttl, byref(version))
        if status < 0 and status not in (lib.NOT_STORED, lib.CHANGED, lib.NO_ITEM):
            raise failure(status)
        return status, version.value

    def add(self, key: Key, value: Value, ttl: int = 0, flags: int = 0) -> bool:
        """Stores a value unless the key has one. Returns whether it was stored."""
        return self._store(lib.cache_add, key, value, ttl, flags)[0] == 0

    def replace(self, key: Key, value: Value, ttl: int = 0, flags: int = 0) -> bool:
        """Replaces a value, if the key has one. Returns whether it was stored."""
        return self._store(lib.cache_replace, key, value, ttl, flags)[0] == 0

    def cas(self, key: Key, value: Value, cas: int, ttl: int = 0, flags: int = 0) -> Optional[bool]:
        """Replaces a value if the item still has the version ``cas``, which :meth:`get_item` has returned.

        Returns true if it was stored, false if the item has another version now, and ``None`` if there is no item.
        """
        status = self._store(lib.cache_cas, key, value, ttl, flags, cas)[0]
        return None if status == lib.NO_ITEM else status == 0

    def append(self, key: Key, value: Value) -> bool:
        """Appends bytes to a value. Returns false if the key has none."""
        return self._extend(lib.cache_append, key, value)

    def prepend(self, key: Key, value: Value) -> bool:
        """Prepends bytes to a value. Returns false if the key has none."""
        return self._extend(lib.cache_prepend, key, value)

    def _extend(self, function: Any, key: Key, value: Value) -> bool:
        key, value = _key(key), _value(value)
        return self._is_done(function(self._handle, key, len(key), value, len(value), None), lib.NOT_STORED)

    @staticmethod
    def _is_done(status: int, no: int) -> bool:
        if status < 0 and status != no:
            raise failure(status)
        return status == 0

    def delete(self, key: Key) -> bool:
        """Removes an item. Returns whether there was one."""
        key = _key(key)
        return self._is_done(lib.cache_delete(self._handle, key, len(key)), lib.NO_ITEM)

    def touch(self, key: Key, ttl: int = 0) -> bool:
        """Changes the time to live of an item. Returns false if there is no item."""
        key = _key(key)
        return self._is_done(lib.cache_touch(self._handle, key, len(key), ttl), lib.NO_ITEM)

    def incr(self, key: Key, delta: int = 1) -> Optional[int]:
        """Adds ``delta`` to a value that is a decimal number, and returns the sum; ``None`` if there is no item.

        The sum wraps around at 64 bits.
        """
        return self._count(lib.cache_increment, key, delta)

    def decr(self, key: Key, delta: int = 1) -> Optional[int]:
        """Subtracts ``delta`` from a value that is a decimal number, but not below 0. Returns the result; ``None`` if there is no item.

        If the result has fewer digits, the value keeps its length and is filled with blanks at its end.
        """
        return self._count(lib.cache_decrement, key, delta)

    def _count(self, function: Any, key: Key, delta: int) -> Optional[int]:
        key = _key(key)
        result = c_uint64()
        is_there = self._is_done(function(self._handle, key, len(key), delta, byref(result)), lib.NO_ITEM)
        return result.value if is_there else None

    def flush(self) -> None:
        """Removes all items."""
        check(lib.cache_flush(self._handle))

    def stats(self, kind: str = "") -> Dict[str, str]:
        """Returns the server's statistics: those of this kind, or the general ones if ``kind`` is empty."""
        text = c_void_p()
        check(lib.cache_stats(self._handle, kind.encode(), byref(text)))
        try:
            lines = ctypes.string_at(text).decode(errors="replace").splitlines()
        finally:
            lib.string_free(text)
        return dict(line.partition(" ")[::2] for line in lines)

    def counters(self) -> Counters:
        """Returns the counters of this object. Does not block."""
        counters = lib.Counters(size=ctypes.sizeof(lib.Counters))
        check(lib.cache_get_counters(self._handle, byref(counters)))
        return Counters(*[getattr(counters, name) for name in Counters._fields])

    def __getitem__(self, key: Key) -> bytes:
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: Key, value: Value) -> None:
        self.set(key, value)

    def __delitem__(self, key: Key) -> None:
        if not self.delete(key):
            raise KeyError(key)

    def __contains__(self, key: Key) -> bool:
        return self.get(key) is not None
