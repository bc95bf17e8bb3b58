"""The rules of an explanation: one table, each row with what it looks at, what it needs, its threshold and how it estimates.

Thresholds stand above what a figure varies by between two runs of the same code: DRAM bytes as ncu counts them by 1 to 3 % (what is
dirty in L2 at a launch's end), clocks by one step of 15 MHz, page faults by a few per cent where there are many.
"""

from __future__ import annotations

from pytest_gpumem.explain.rule import GAP_SECONDS, Need, Rule
from pytest_gpumem.explain.rules_link import (
    FEW_FAULTS,
    GROUP_SECONDS,
    MORE_FAULTS,
    migrations,
    more_copies,
    page_faults,
    pageable,
    stays_on_host,
)
from pytest_gpumem.explain.rules_memory import (
    WINDOW_RULES,
    access_pattern,
    fewer_threads,
    keeps_less,
    l2_misses,
    memory_clock,
    more_bytes,
    more_kernels,
    occupancy,
    set_aside_too_large,
    sm_clock,
    thrashing,
    window_gone,
)

NCU = Need("needs counters of ncu on both sides", lambda sides: sides.counted)
WATCHED = Need("needs --gpumem-explain (CUPTI) or a profile on both sides", lambda s: s.base.knows_kernels and s.head.knows_kernels)
COPIES = Need("needs --gpumem-explain (CUPTI) or nsys on both sides", lambda s: s.base.copies is not None and s.head.copies is not None)
KINDS = Need(
    "needs --gpumem-explain on both sides",
    lambda s: (s.base.copies is not None and s.head.copies is not None) or bool(s.base.host_memory and s.head.host_memory),
)
PAGES = Need("needs page counts (CUPTI or nsys) on both sides", lambda s: s.base.pages is not None and s.head.pages is not None)
PATTERN = Need(
    "needs counters of ncu on both sides",
    lambda s: s.counted or bool(s.base.measurement.sectors_per_request and s.head.measurement.sectors_per_request),
)
BYTES = Need(
    "needs declared traffic or counters of ncu on both sides", lambda s: s.counted or bool(s.base.compulsory and s.head.compulsory)
)

_MISSES = "DRAM bytes that L2 no longer saves, at what the average byte costs; open above"
_FAULTS = f"groups × {GROUP_SECONDS * 1e6:g} us + migrated bytes over the link's rate; open above"
_OVER_LINK = "bytes over the link's rate; open above"
_SLOWER_COPY = "time of the copies less their time at the rate that they had; open above"
_ITS_TIME = f"their running time + {GAP_SECONDS * 1e6:g} us for each"
_FACTOR = "kernel time × (1 − 1/ratio), by its part of all such factors"
_ASKED = "kernel time × (1 − 1/growth of what L2 is asked), by its part of all such factors; above that waiting for L1, after all others"
_WAITING = "kernel time × (1 − ratio), after all others"

RULES: tuple[Rule, ...] = (
    Rule("window gone", "persisting window", WINDOW_RULES[window_gone], "any", _MISSES, (), window_gone),
    Rule("thrashing", "hit ratio × window over the set-aside", WINDOW_RULES[thrashing], "more than fits", _MISSES, (), thrashing),
    Rule("keeps less", "bytes that a window keeps in L2", WINDOW_RULES[keeps_less], "fewer bytes", _MISSES, (), keeps_less),
    Rule(
        "set-aside too large",
        "set-aside that no window needs",
        WINDOW_RULES[set_aside_too_large],
        "more of L2",
        _MISSES,
        (),
        set_aside_too_large,
    ),
    Rule("page faults", "GPU page faults in a launch", MORE_FAULTS, f"more, and {FEW_FAULTS} besides", _FAULTS, (PAGES,), page_faults),
    Rule("migrations", "managed memory that moves in a launch", 0.1, "more bytes", _OVER_LINK, (PAGES,), migrations),
    Rule("stays on the host", "managed memory read over the link", 0.1, "more bytes", _OVER_LINK, (PAGES,), stays_on_host),
    Rule("pageable", "kind of host memory that copies use", 0.05, "of the copied bytes", _SLOWER_COPY, (KINDS,), pageable),
    Rule("more copies", "copies and memsets in a launch", 0.05, "more bytes, or one more", _ITS_TIME, (COPIES,), more_copies),
    Rule("more kernels", "kernels in a launch", 0.5, "more", _ITS_TIME, (WATCHED,), more_kernels),
    Rule("access pattern", "sectors for the bytes that threads use", 0.1, "more sectors", _ASKED, (PATTERN,), access_pattern),
    Rule("more bytes", "bytes to move", 0.03, "more bytes", _FACTOR, (BYTES,), more_bytes),
    Rule("L2 misses", "DRAM bytes for what is asked of L2", 0.06, "more bytes, and 1 MB", _FACTOR, (NCU,), l2_misses),
    Rule("fewer threads", "share of the device's threads in the grid", 0.2, "less", "kernel time × (1 − ratio)", (WATCHED,), fewer_threads),
    Rule("occupancy", "achieved occupancy of a kernel that DRAM bounds", 0.15, "less", _WAITING, (NCU,), occupancy),
    Rule("SM clock", "SM clock while sampling", 0.02, "lower", "base × (ratio − 1) × what DRAM does not bound", (), sm_clock),
    Rule("memory clock", "memory clock while sampling", 0.02, "lower", "base × (ratio − 1) × what DRAM bounds", (), memory_clock),
)
"""All rules, in the order in which they are looked through."""
