"""What a compiled object says of the GPU code in it: architecture, kernels, registers.

A compiled object carries each GPU image as an ELF file of its own (machine 190, EM_CUDA). The layout read here is
ELF's (System V ABI); the architecture is what ptxas notes of its own command line, and the register count the
EIATTR_REGCOUNT attribute of ``.nv.info``, as LLVM's and cuobjdump's readers know it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MAGIC = b"\x7fELF\x02\x01"  # 64-bit, little-endian
_EM_CUDA = 190
_EIFMT_SVAL, _EIATTR_REGCOUNT = 4, 0x2F


@dataclass(frozen=True)
class Kernel:
    name: str
    arch: str
    registers: int | None  # per thread


@dataclass(frozen=True)
class _Section:
    name: str
    data: bytes


def _images(data: bytes) -> Iterator[list[_Section]]:
    for match in re.finditer(re.escape(_MAGIC), data):
        image = data[match.start() :]
        (machine,) = struct.unpack_from("<H", image, 18)
        if machine != _EM_CUDA:
            continue
        (headers,) = struct.unpack_from("<Q", image, 40)
        size, count, names_index = struct.unpack_from("<HHH", image, 58)
        # name, type, flags, address, offset, size, link, info, alignment, entry size
        table = [struct.unpack_from("<IIQQQQIIQQ", image, headers + i * size) for i in range(count)]
        names = image[table[names_index][4] :]
        yield [
            _Section(names[row[0] : names.index(b"\0", row[0])].decode(), image[row[4] : row[4] + row[5]])
            for row in table
        ]


def _registers(sections: dict[str, bytes]) -> dict[str, int]:
    """Registers per thread of each kernel of one image."""
    symbols, strings, info = (sections.get(name, b"") for name in (".symtab", ".strtab", ".nv.info"))
    found, at = {}, 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _EIFMT_SVAL:
            continue
        if attribute == _EIATTR_REGCOUNT and size == 8:
            symbol, registers = struct.unpack_from("<II", info, at)
            (name,) = struct.unpack_from("<I", symbols, symbol * 24)
            found[strings[name : strings.index(b"\0", name)].decode()] = registers
        at += size
    return found


def kernels(data: bytes) -> list[Kernel]:
    """Every kernel in ``data``. An object that is damaged or of a form not known yields none."""
    found = []
    try:
        for image in _images(data):
            sections = {section.name: section.data for section in image}
            arch = re.search(rb"-arch (sm_\d+[af]?)", sections.get(".note.nv.tkinfo", b""))
            registers = _registers(sections)
            found += [
                Kernel(name, arch.group(1).decode() if arch else "unknown", registers.get(name))
                for name in (n.removeprefix(".text.") for n in sections if n.startswith(".text."))
            ]
    except (struct.error, IndexError, ValueError, OverflowError):
        return []
    return found


def architectures(data: bytes) -> set[str]:
    """The architectures, such as ``"sm_90a"``, that ``data`` holds kernels for."""
    return {kernel.arch for kernel in kernels(data)}
