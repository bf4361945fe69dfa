"""The cache."""

import ctypes
import threading
from ctypes import byref, c_uint64, c_void_p, create_string_buffer
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, TypeVar, Union

from . import _library as lib
from ._library import cache_get as _get
from ._library import check, failure

#: Text is encoded as UTF-8.
Key = Union[bytes, str]
Value = Union[bytes, bytearray, memoryview, str]
K = TypeVar("K", bytes, str)
D = TypeVar("D")

#: Longer values need another look.
ROOM = 16 << 10
#: Keys whose values are asked for with one call.
TOGETHER = 1024


class Item(NamedTuple):
    """A value, and what is known of it."""

    value: bytes
    #: The client's, as they were stored.
    flags: int
    #: Its version, for :meth:`Cache.cas`.
    cas: int


class Counters(NamedTuple):
    """What a :class:`Cache` has done since it was opened."""

    #: Items that were found in memory.
    hits: int
    #: Keys that memory has no item of.
    misses: int
    #: Keys that the server was asked for, because memory could not tell.
    asked: int
    #: Requests whose answers were lost.
    lost: int
    #: Connections that were opened to servers.
    connections: int
    #: Keys whose hits were reported to the server.
    reported: int


class _Room(threading.local):
    """Where values are copied to: of each thread its own."""

    def __init__(self) -> None:
        self.buffer = create_string_buffer(ROOM)
        self.address = ctypes.addressof(self.buffer)
        self.size = ROOM
        self.item = lib.Item(size=ctypes.sizeof(lib.Item))
        self.item_address = ctypes.addressof(self.item)

    def grow(self, size: int) -> None:
        self.buffer = create_string_buffer(size)
        self.address = ctypes.addressof(self.buffer)
        self.size = size


def _key(key: Key) -> bytes:
    return key.encode() if isinstance(key, str) else bytes(key)


def _value(value: Value) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class Cache:
    """A cache that is open, by its address ``SEGMENT/NAME``.

    A get is a lookup and a copy in shared memory; it waits for nobody wherever memory can tell. Changes go to the server, one after the
    other. When a change returns, the next get of any reader finds it, or something newer. If the server dies before it answers, that is
    :class:`Lost`: the change may have been done or not. :class:`NoServer` means that it was not done.

    Keys are bytes, or text as UTF-8: 1 to 250 bytes, or up to 186 if there are blanks or control characters among them. Values are
    bytes, or text as UTF-8; what is got is bytes. ``ttl`` is in how many seconds an item ends; 0: never.

    :param socket: path of the daemon's socket; otherwise ``$GINNEL_SOCKET`` or ``/run/ginnel/ginnel.sock``
    :param name: what this program calls itself, for people
    :param changes: where changes go: ``"channel SEGMENT"``, ``"tcp ADDRESS:PORT"`` or ``"unix PATH"``; otherwise where the cache says
    :param patience: seconds for which a cache that is not there, or a server that is being replaced, is waited for
    :param timeout: seconds that the server may take for an answer

    May be used by several threads, and as a context manager. ``cache[key]`` gets, sets and removes items as a dict does.
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
        self._room = _Room()

    def close(self) -> None:
        """Closes it. No other thread may be using it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            lib.cache_close(handle)

    def __enter__(self) -> "Cache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # At the end of the interpreter, or of an object that was never open, there may be nothing to close with.
        if getattr(self, "_handle", None) is not None and lib is not None:
            self.close()

    def __repr__(self) -> str:
        return f"Cache({self.address!r})"

    def get(self, key: Key, default: Any = None) -> Any:
        """The value of a key, or ``default`` if there is none."""
        if key.__class__ is not bytes:
            key = _key(key)
        room = self._room
        length = _get(self._handle, key, len(key), room.address, room.size, None)
        if length >= 0:
            return room.buffer[:length]
        if length == -3:
            return default
        item = self._get_item(key, length)
        return default if item is None else item.value

    def get_item(self, key: Key) -> Optional[Item]:
        """The value of a key with its flags and its version; ``None`` if there is none."""
        return self._get_item(_key(key), lib.BUFFER_TOO_SMALL)

    def _get_item(self, key: bytes, status: int) -> Optional[Item]:
        room = self._room
        while status == lib.BUFFER_TOO_SMALL:
            status = _get(self._handle, key, len(key), room.address, room.size, room.item_address)
            if status == lib.BUFFER_TOO_SMALL:
                room.grow(room.item.length + 1024)
        if status == lib.NO_ITEM:
            return None
        return Item(room.buffer[: check(status)], room.item.flags, room.item.cas)

    def get_many(self, keys: Iterable[K]) -> Dict[K, bytes]:
        """The values of those of the keys that there are items of. Takes far less time than as many calls of :meth:`get`."""
        found: Dict[K, bytes] = {}
        todo: List[K] = list(keys)
        for begin in range(0, len(todo), TOGETHER):
            self._get_some(todo[begin : begin + TOGETHER], found)
        return found

    def _get_some(self, keys: List[K], values: Dict[K, bytes]) -> None:
        count = len(keys)
        coded = [_key(key) for key in keys]
        wanted = (lib.Key * count)(*[(key, len(key)) for key in coded])
        found = (lib.Found * count)()
        room = self._room
        buffer = room.buffer
        check(lib.cache_get_many(self._handle, wanted, count, buffer, room.size, found))
        for key, one in zip(keys, found):
            status = one.status
            if status == 0:
                offset = one.offset
                values[key] = buffer[offset : offset + one.length]
            elif status == lib.BUFFER_TOO_SMALL:
                # Those whose values had no room left are few, or large. This buffer is still read.
                rest = self._one_more(_key(key), one.length)
                if rest is not None:
                    values[key] = rest

    def _one_more(self, key: bytes, length: int) -> Optional[bytes]:
        item = lib.Item(size=ctypes.sizeof(lib.Item))
        while True:
            buffer = create_string_buffer(length + 1024)
            status = _get(self._handle, key, len(key), ctypes.addressof(buffer), len(buffer), ctypes.addressof(item))
            if status == lib.NO_ITEM:
                return None
            if status != lib.BUFFER_TOO_SMALL:
                return buffer[: check(status)]
            length = item.length

    def set(self, key: Key, value: Value, ttl: int = 0, flags: int = 0) -> int:
        """Stores a value, whatever was there before. Returns its version."""
        return self._store(lib.cache_set, key, value, ttl, flags)[1]

    def set_many(self, values: Mapping[K, Value], ttl: int = 0, flags: int = 0) -> Dict[K, lib.Error]:
        """Stores many values, without waiting for one before the next is sent. Returns those that were not stored, and why."""
        failed: Dict[K, lib.Error] = {}
        todo: List[Tuple[K, Value]] = list(values.items())
        for begin in range(0, len(todo), TOGETHER):
            some = todo[begin : begin + TOGETHER]
            coded = [(_key(key), _value(value)) for key, value in some]
            entries = (lib.Entry * len(some))(
                *[(key, len(key), value, len(value), flags, ttl) for key, value in coded]
            )
            results = (lib.Stored * len(some))()
            check(lib.cache_set_many(self._handle, entries, len(some), results))
            for (key, _), result in zip(some, results):
                if result.status < 0:
                    failed[key] = lib.failure_of_one(result.status)
        return failed

    def _store(self, function: Any, key: Key, value: Value, ttl: int, flags: int, cas: int = 0) -> Tuple[int, int]:
        key, value = _key(key), _value(value)
        version = c_uint64(cas)
        status = function(self._handle, key, len(key), value, len(value), flags, ttl, byref(version))
        if status < 0 and status not in (lib.NOT_STORED, lib.CHANGED, lib.NO_ITEM):
            raise failure(status)
        return status, version.value

    def add(self, key: Key, value: Value, ttl: int = 0, flags: int = 0) -> bool:
        """Stores a value unless there is one. Whether it is stored."""
        return self._store(lib.cache_add, key, value, ttl, flags)[0] == 0

    def replace(self, key: Key, value: Value, ttl: int = 0, flags: int = 0) -> bool:
        """Stores a value in the place of one. Whether it is stored."""
        return self._store(lib.cache_replace, key, value, ttl, flags)[0] == 0

    def cas(self, key: Key, value: Value, cas: int, ttl: int = 0, flags: int = 0) -> Optional[bool]:
        """Stores a value in the place of the very version that :meth:`get_item` has returned.

        False if the item is another one now, ``None`` if there is none.
        """
        status = self._store(lib.cache_cas, key, value, ttl, flags, cas)[0]
        return None if status == lib.NO_ITEM else status == 0

    def append(self, key: Key, value: Value) -> bool:
        """Puts bytes behind a value. Whether there is one."""
        return self._extend(lib.cache_append, key, value)

    def prepend(self, key: Key, value: Value) -> bool:
        """Puts bytes before a value. Whether there is one."""
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
        """Removes an item. Whether there was one."""
        key = _key(key)
        return self._is_done(lib.cache_delete(self._handle, key, len(key)), lib.NO_ITEM)

    def touch(self, key: Key, ttl: int = 0) -> bool:
        """Changes in how many seconds an item ends. Whether there is one."""
        key = _key(key)
        return self._is_done(lib.cache_touch(self._handle, key, len(key), ttl), lib.NO_ITEM)

    def incr(self, key: Key, delta: int = 1) -> Optional[int]:
        """Adds to a value that is a number in decimal digits; beyond 64 bits it goes on from 0. ``None`` if there is none."""
        return self._count(lib.cache_increment, key, delta)

    def decr(self, key: Key, delta: int = 1) -> Optional[int]:
        """Takes from a value that is a number, but not below 0. ``None`` if there is none."""
        return self._count(lib.cache_decrement, key, delta)

    def _count(self, function: Any, key: Key, delta: int) -> Optional[int]:
        key = _key(key)
        result = c_uint64()
        is_there = self._is_done(function(self._handle, key, len(key), delta, byref(result)), lib.NO_ITEM)
        return result.value if is_there else None

    def flush(self) -> None:
        """Ends all items."""
        check(lib.cache_flush(self._handle))

    def stats(self, kind: str = "") -> Dict[str, str]:
        """The server's statistics: of this kind, or the general ones."""
        text = c_void_p()
        check(lib.cache_stats(self._handle, kind.encode(), byref(text)))
        try:
            lines = ctypes.string_at(text).decode(errors="replace").splitlines()
        finally:
            lib.string_free(text)
        return dict(line.partition(" ")[::2] for line in lines)

    def counters(self) -> Counters:
        """What this object has done."""
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
