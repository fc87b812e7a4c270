"""Numbers as people read them."""

from __future__ import annotations


def size(size_bytes: float) -> str:
    """Bytes with three or four digits: "1.49 GB" (powers of 1000)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size_bytes) >= scale:
            value = size_bytes / scale
            return (
                f"{value:.0f} {unit}"
                if value >= 100
                else f"{value:.1f} {unit}"
                if value >= 10
                else f"{value:.2f} {unit}"
            )
    return f"{size_bytes:.0f} B"


def time(us: float) -> str:
    """Times: "850 us", "12.3 ms", "1.52 s"."""
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    if us >= 1e3:
        return f"{us / 1e3:.1f} ms" if us >= 1e4 else f"{us / 1e3:.2f} ms"
    return f"{us:.0f} us"


def count(number: float) -> str:
    """Large counts: "8.03 B"."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number:.0f}"


def share(part: float, whole: float) -> str:
    """Percent of a whole, one decimal; "-" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
