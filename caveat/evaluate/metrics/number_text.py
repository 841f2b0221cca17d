"""Numbers as a person reads them: scores, their standard errors, seconds and bytes."""

__all__ = ["format_bytes", "format_error", "format_number", "format_seconds"]


def format_number(value: float | None) -> str:
    """Write a score with three decimals, or two significant digits where those would be lost: 0.972, 3.2e−06, 1,204."""
    if value is None:
        return "–"
    size = abs(value)
    if size >= 100:
        text = f"{value:,.0f}" if size >= 1000 else f"{value:.1f}"
    else:
        text = f"{value:.3f}" if size >= 0.01 or size == 0 else f"{value:.2g}"
    return text.replace("-", "−")


def format_error(value: float) -> str:
    """Write a standard error to two significant digits: 0.0073, 0.15, 12."""
    if value == 0:
        return "0"
    return f"{value:#.2g}" if value < 9.5 else f"{value:,.0f}"


def format_seconds(value: float | None) -> str:
    """Write a time so that a person reads it at once: 12 µs, 31 ms, 12.4 s, 3 min 20 s, 2.5 h."""
    if value is None:
        return "–"
    if value < 100:
        unit, factor = ("s", 1) if value >= 1 or value == 0 else ("ms", 1e3) if value >= 0.001 else ("µs", 1e6)
        return f"{factor * value:.3g} {unit}"
    return f"{int(value) // 60} min {int(value) % 60:02d} s" if value < 7200 else f"{value / 3600:,.1f} h"


def format_bytes(value: float | None) -> str:
    """Write a size in decimal units: 812 B, 40.2 kB, 1.3 GB."""
    if value is None:
        return "–"
    units = ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"
