# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Write a zip archive that takes members of another one over as they are.

Compressed bytes are copied, not compressed again: of a 330 MB wheel nearly all is
libraries that stay. New members are stored uncompressed with a given date, so that the
archive's bytes depend on its contents only, not on the zlib at hand.
"""

import struct
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_UTF8 = 0x800
_CHUNK = 1 << 20


class ZipCopier:
    """Collects members in order; `close` writes the directory. Below 4 GiB only."""

    def __init__(self, target: Path, source: zipfile.ZipFile):
        self._source = source
        assert source.filename is not None
        self._input: BinaryIO = open(source.filename, "rb")  # noqa: SIM115
        self._output: BinaryIO = open(target, "wb")  # noqa: SIM115
        self._directory: list[bytes] = []

    def __enter__(self) -> "ZipCopier":
        return self

    def __exit__(self, *error: object) -> None:
        self._input.close()
        self._output.close()

    def copy(self, info: zipfile.ZipInfo) -> None:
        """Take a member of the source over, compressed as it is."""
        self._input.seek(info.header_offset)
        header = _LOCAL.unpack(self._input.read(_LOCAL.size))
        if header[0] != b"PK\x03\x04":
            raise zipfile.BadZipFile(f"{info.filename}: bad local header")
        self._input.seek(header[9] + header[10], 1)  # its name and extra field
        self._header(info, info.compress_type, info.CRC, info.compress_size)
        left = info.compress_size
        while left:
            chunk = self._input.read(min(left, _CHUNK))
            if not chunk:
                raise zipfile.BadZipFile(f"{info.filename}: the archive is truncated")
            self._output.write(chunk)
            left -= len(chunk)

    def add(self, info: zipfile.ZipInfo, data: bytes) -> None:
        """Store a new member; name, date and mode are those of `info`."""
        info.file_size = len(data)
        self._header(info, zipfile.ZIP_STORED, zlib.crc32(data), len(data))
        self._output.write(data)

    def close(self) -> None:
        start = self._output.tell()
        for entry in self._directory:
            self._output.write(entry)
        size = self._output.tell() - start
        count = len(self._directory)
        self._output.write(_END.pack(b"PK\x05\x06", 0, 0, count, count, size, start, 0))

    def _header(
        self, info: zipfile.ZipInfo, method: int, crc: int, compressed: int
    ) -> None:
        name = info.filename.encode()
        flags = 0 if info.filename.isascii() else _UTF8
        year, month, day, hour, minute, second = info.date_time
        date = (year - 1980) << 9 | month << 5 | day
        time = hour << 11 | minute << 5 | second // 2
        shared = (20, flags, method, time, date, crc, compressed, info.file_size)
        offset = self._output.tell()
        self._output.write(_LOCAL.pack(b"PK\x03\x04", *shared, len(name), 0) + name)
        made_by = 3 << 8 | 20  # unix: external_attr holds the file's mode
        self._directory.append(
            _CENTRAL.pack(
                b"PK\x01\x02", made_by, *shared, len(name), 0, 0, 0, 0,
                info.external_attr, offset,
            )
            + name
        )  # fmt: skip
