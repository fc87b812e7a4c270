"""A part of a file that is read as if it were a file of its own."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

from fsdp_compile.errors import CheckpointError

_PIECE_BYTES = 1 << 20


class FilePart(io.RawIOBase):
    """`length` bytes of a file from `offset` on; read only.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path, offset: int, length: int) -> None:
        super().__init__()
        self._file = path.open("rb")
        self._offset, self._length, self._position = offset, length, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a byte of the part."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError(f"there is no byte {start + offset}")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        """The byte of the part that is read next."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, as far as the part goes."""
        view = memoryview(buffer).cast("B")
        self._file.seek(self._offset + self._position)
        count = self._file.readinto(view[: max(0, self._length - self._position)])
        self._position += count
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def check_sums(file: io.RawIOBase, what: str) -> None:
    """Compare what `torch.save` wrote with the checksum (CRC-32) that it gave to each of its records.

    Under `torch.serialization.set_crc32_options(False)` it gives them 0, and there is nothing to compare.

    Args:
        file: What it wrote.
        what: Its name in errors.

    Raises:
        CheckpointError: A record differs, or there are none.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(file)) as archive:
            for record in archive.infolist():
                if record.CRC:
                    _read(archive, record)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, struct.error) as error:
        raise CheckpointError(f"the contents of {what} have changed: {error}") from None


def _read(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """Read a record to its end, where its checksum is compared."""
    with archive.open(record) as opened:
        while opened.read(_PIECE_BYTES):
            pass
