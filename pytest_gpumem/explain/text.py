"""An explanation as text and as plain values. All sentences about causes are here."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pytest_gpumem.explain import what_ran
from pytest_gpumem.explain.causes import Cause, Explanation, Note
from pytest_gpumem.judging.finding import change, counted
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import UNEXPLAINED, UP_TO, Row
from pytest_gpumem.reporting.columns import hanging, wrapped
from pytest_gpumem.units import format_rate, format_share, format_time, short_bytes

WIDTH = 120
RATE_VARIES = 0.01  # change of an L2 hit rate that has no meaning


def text(key: str, explanation: Explanation, *, width: int = WIDTH, skipped: bool = True) -> str:
    """The explanation of one measurement: its slow-down, each cause with its part, and the rest.
    `key`: `Row.key` of the measurement.
    `skipped`: name the topics of the rules without evidence.
    """
    key, explanation = printable(key), printable(explanation)
    slow_down = explanation.slow_down
    ends = f"{change(slow_down.low / slow_down.base)} to {change(slow_down.high / slow_down.base)}, {100 * slow_down.confidence:.0f} %"
    first = f"{key}: {format_time(slow_down.base)} → {format_time(slow_down.head)}, {change(slow_down.share)} ({ends})"
    lines = wrapped(first, width, indent="    ")
    # Before any figure: what ran is exact.
    for difference in () if explanation.ran is None else what_ran.lines(explanation.ran):
        lines += hanging("  ", difference, width)
    if (why := nothing_to_explain(explanation)) is not None:
        lines.append(f"  nothing to explain: {why}")
    for seconds, words in sorted(_parts(explanation), key=lambda one: -one[0]):
        lines += hanging(
            f"  {format_share(seconds / slow_down.seconds):>7} {format_time(seconds):>9}  ",
            words,
            width,
        )
    for note in explanation.notes:
        lines += hanging("  note: ", note_text(note), width)
    for missing in not_looked_at(explanation) if skipped else ():
        lines += hanging("  not looked at: ", missing, width)
    return "\n".join(lines)


def reasons(row: Row, explanation: Explanation, base: str | None) -> tuple[str, ...]:
    """The lines of `Row.why`: what ran differently, the causes of a slow-down, and the command for the causes that need more counts.
    `base`: the revision in the command; None for none.
    """
    if explanation.causes:
        why = (
            text(row.key, explanation, width=sys.maxsize, skipped=False)
            .removeprefix(f"{printable(row.key)}: ")
            .splitlines()
        )
    else:
        why = [] if explanation.ran is None else what_ran.lines(explanation.ran)
    why = [line for line in why if line.strip() != what_ran.SAME]  # no cause
    if explanation.skipped and base is not None:
        causes = (
            f"for {counted(len(explanation.skipped), 'further cause')}, which need more counts"
            if explanation.causes
            else "for causes"
        )
        why.append(f"{causes}: gpumem explain --base {shlex.quote(base)} {shlex.quote(row.nodeid)}")
    return tuple(why)


def _parts(explanation: Explanation) -> Iterator[tuple[float, str]]:
    for cause in explanation.causes:
        yield cause.seconds, f"{UP_TO if cause.up_to else ''}{sentence(cause)}"
    if explanation.unexplained > 0:
        yield explanation.unexplained, UNEXPLAINED


def nothing_to_explain(explanation: Explanation) -> str | None:
    """Why there is nothing to explain; None if there is."""
    found = explanation.slow_down
    if found.real:
        return None
    return f"no slow-down beyond its interval ({100 * found.low / found.base:+.2f} to {100 * found.high / found.base:+.2f} %)"


def not_looked_at(explanation: Explanation) -> tuple[str, ...]:
    """The topics of the rules without evidence, by the evidence that they need."""
    missing: dict[str, list[str]] = {}
    for rule, needs in explanation.skipped:
        missing.setdefault(" and ".join(need.words for need in needs), []).append(rule.looks_at)
    return tuple(f"{', '.join(topics)}: {needs}" for needs, topics in missing.items())


def to_json(key: str, explanation: Explanation) -> dict[str, Any]:
    """The same as plain values: seconds and shares, causes in their order."""
    found = explanation.slow_down
    return {
        "key": key,
        "base_seconds": found.base,
        "head_seconds": found.head,
        "slow_down": {
            "seconds": found.seconds,
            "share": found.share,
            "low_seconds": found.low,
            "high_seconds": found.high,
            "confidence": found.confidence,
        },
        "ran_differently": None
        if explanation.ran is None
        else [{**asdict(one), "sentence": one.text} for one in explanation.ran],
        "first": explanation.first,
        "causes": [
            {
                "rule": cause.rule,
                "sentence": sentence(cause),
                "seconds": cause.seconds,
                "share": cause.share,
                "up_to": cause.up_to,
                "estimate_seconds": cause.estimate,
                "evidence": {
                    name: {"base": was, "head": now} for name, (was, now) in cause.figures.items()
                },
                "details": dict(cause.details),
            }
            for cause in explanation.causes
        ],
        "unexplained": {"seconds": explanation.unexplained, "share": explanation.unexplained_share},
        "nothing_to_explain": nothing_to_explain(explanation),
        "notes": [note_text(note) for note in explanation.notes],
        "not_looked_at": list(not_looked_at(explanation)),
    }


# Notes


def note_text(note: Note) -> str:
    """A note as a sentence."""
    base, head = (
        format_time(one) if isinstance(one, float) else one for one in (note.base, note.head)
    )
    return NOTES[note.code].format(base=base, head=head)


_TAKE_LONGER = (
    "{base} → {head}: arithmetic, bank conflicts, divergence, atomics or waiting, which no rule looks at; "
    "`gpumem profile ncu --set full` shows them"
)
NOTES: Mapping[str, str] = {
    "sampler": "base was timed by the sampler {base}, head by {head}: a part of the difference may be the clock's",
    "mode": "base was measured {base}, head {head}",
    "kernels": "other kernels run: {head} where it was {base}",
    "in the kernels": f"the kernels themselves take longer, {_TAKE_LONGER}",
    "in the kernels, counted": f"the kernels themselves take longer at about the same bytes and accesses, {_TAKE_LONGER}",
    "beside the kernels": "the kernels take no longer, {base} → {head}: the time goes beside them, to the host, to gaps or to what waits "
    "for another stream",
}


# Sentences


def sentence(cause: Cause) -> str:
    """The change, without a full stop."""
    return SENTENCES[cause.rule](cause)


def _pair(cause: Cause, name: str) -> tuple[float, float] | None:
    """A figure of both sides; None unless both are known."""
    was, now = cause.figures.get(name, (None, None))
    return None if was is None or now is None else (was, now)


def _values(cause: Cause, name: str) -> tuple[float, float]:
    """A figure of both sides, 0 where it is unknown."""
    was, now = cause.figures.get(name, (None, None))
    return was or 0.0, now or 0.0


def _growth(pair: tuple[float, float]) -> float:
    return pair[1] / pair[0] - 1 if pair[0] else 0.0


def _hit_rate(cause: Cause) -> str:
    """ " (L2 hit rate 71 → 52 %)", if it changed."""
    rates = _pair(cause, "l2_hit_rate")
    return (
        f" (L2 hit rate {100 * rates[0]:.0f} → {100 * rates[1]:.0f} %)"
        if rates and abs(rates[1] - rates[0]) >= RATE_VARIES
        else ""
    )


def _dram_reads(cause: Cause) -> str:
    """ "DRAM reads +34 % (L2 hit rate 71 → 52 %): ", if they grew."""
    was, now = _values(cause, "dram_read")
    if not was or now <= was:
        return ""
    grown = (
        format_share(now / was - 1, sign=True)
        if now / was < 11
        else f"{short_bytes(was)} → {short_bytes(now)}"
    )
    return f"DRAM reads {grown}{_hit_rate(cause)}: "


def _kernel(cause: Cause) -> str:
    return f"{cause.details['kernel']}: " if "kernel" in cause.details else ""


def _window_gone(cause: Cause) -> str:
    aside = cause.figures["set_aside"]
    set_aside = (
        f"; set-aside {short_bytes(aside[0] or 0)} → {short_bytes(aside[1])}"
        if aside[1] is not None
        else ""
    )
    window = short_bytes(_values(cause, "window")[0])
    return f"{_dram_reads(cause)}{window} no longer stay in L2, their persisting window is gone{set_aside}"


def _thrashing(cause: Cause) -> str:
    (_, window), (_, ratio), (_, aside) = (
        _values(cause, name) for name in ("window", "hit_ratio", "set_aside")
    )
    before = cause.figures["hit_ratio"][0]
    return (
        f"{_dram_reads(cause)}the window thrashes: hit ratio {'' if before is None else f'{before:.3g} → '}{ratio:.3g} of "
        f"{short_bytes(window)} asks for {short_bytes(window * ratio)} in a set-aside of {short_bytes(aside)}, "
        "so its lines evict each other"
    )


def _keeps_less(cause: Cause) -> str:
    was, now = _values(cause, "kept")
    moved = []
    for name, words, form in (
        ("set_aside", "set-aside", short_bytes),
        ("hit_ratio", "hit ratio", "{:.3g}".format),
        ("window", "window", short_bytes),
    ):
        before, after = _values(cause, name)
        if after < before:
            moved.append(f"{words} {form(before)} → {form(after)}")
    return f"{_dram_reads(cause)}the window keeps {short_bytes(now)} of its bytes in L2 where it kept {short_bytes(was)}: {', '.join(moved)}"


def _set_aside_too_large(cause: Cause) -> str:
    (before, after), (_, l2) = _values(cause, "set_aside"), _values(cause, "l2")
    (_, window), (_, ratio) = _values(cause, "window"), _values(cause, "hit_ratio")
    need = (
        f"the window needs {short_bytes(window * ratio)} of it" if window else "no window uses it"
    )
    rest = (
        f"; everything else has {short_bytes(max(0, l2 - after))} of L2 where it had {short_bytes(max(0, l2 - before))}"
        if l2
        else ""
    )
    return f"set-aside {short_bytes(before)} → {short_bytes(after)}: {need}{rest}{_hit_rate(cause)}"


_FAULTS = {
    "prefetch gone": "the prefetch is gone",
    "evicted": "managed memory no longer fits, pages are evicted",
    "elsewhere": "pages are not where the kernel runs when it touches them",
}


def _page_faults(cause: Cause) -> str:
    (was, now), (moved, moves) = _values(cause, "gpu_page_faults"), _values(cause, "migrated")
    before = f"where there were {was:.0f}" if was else "where there were none"
    also = f", before {short_bytes(moved)}" if moved else ""
    faults = counted(round(now), "GPU page fault")
    return f"{faults} {before}: {_FAULTS[cause.details['why']]}; {short_bytes(moves)} move during the launch{also}"


def _migrations(cause: Cause) -> str:
    was, now = _values(cause, "migrated")
    by = f", by {cause.details['why']}" if cause.details["why"] else ""
    faults = _pair(cause, "cpu_page_faults")
    host = (
        f"; {counted(round(faults[1]), 'page fault')} of the host, before {faults[0]:.0f}"
        if faults
        else ""
    )
    return f"managed memory that moves during a launch {short_bytes(was)} → {short_bytes(now)}{by}{host}"


def _stays_on_host(cause: Cause) -> str:
    was, now = _values(cause, "mapped")
    return f"{short_bytes(now)} of managed memory are mapped where they lie and read over the link, before {short_bytes(was)}"


_WAYS = {
    "H2D": "from host to device",
    "D2H": "from device to host",
    "D2D": "within the device",
    "P2P": "between devices",
}


def _pageable(cause: Cause) -> str:
    if "arguments" in cause.details:
        return f"pageable instead of {cause.details['was']}: {cause.details['arguments']}"
    rates = _pair(cause, "copy_rate")
    change_of_rate = f", {format_rate(rates[0])} → {format_rate(rates[1])}" if rates else ""
    nbytes = short_bytes(_values(cause, "pageable_bytes")[1])
    return f"pageable instead of pinned: {nbytes} {_WAYS[cause.details['way']]} in each launch{change_of_rate}"


def _more_copies(cause: Cause) -> str:
    parts = []
    for kind in [name.removesuffix("_bytes") for name in cause.figures if name.endswith("_bytes")]:
        (had, has), (before, after) = (
            _values(cause, f"{kind}_bytes"),
            _values(cause, f"{kind}_count"),
        )
        one, several = ("memset", "memsets") if kind == "memset" else ("copy", "copies")
        words = [f"{after:.0f}", one if after == 1 else several]
        if kind != "memset":
            memory = cause.details[f"{kind}_memory"]
            words += [*([f"of {memory} memory"] if memory else []), _WAYS.get(kind, kind)]
        old = f"before {short_bytes(had)} in {before:.0f}" if before else "before none"
        parts.append(f"{' '.join(words)} of {short_bytes(has)} in each launch, {old}")
    return "; ".join(parts)


def _more_kernels(cause: Cause) -> str:
    (was, now), (gone, took) = _values(cause, "kernels"), _values(cause, "replaced_seconds")
    instead = f" in place of {cause.details['replaced']}" if "replaced" in cause.details else ""
    longer = f", {format_time(took - gone)} more" if took > gone else ""
    return f"{now:.3g} {'kernel' if now == 1 else 'kernels'} in each launch where it was {was:.3g}: {cause.details['added']}{instead}{longer}"


def _access_pattern(cause: Cause) -> str:
    noun = cause.details["of"]
    sectors = _pair(cause, "sectors_per_store" if noun == "store" else "sectors_per_request")
    counts = f"sectors per {noun} {sectors[0]:.3g} → {sectors[1]:.3g}: " if sectors else ""
    dram = _pair(cause, "dram")
    more = f"; DRAM bytes {format_share(_growth(dram), sign=True)}" if dram else ""
    return f"{_kernel(cause)}{counts}{_pattern(cause, noun)}{_kept_by_l1(cause)}{more}"


def _pattern(cause: Cause, noun: str) -> str:
    pattern, ratio = cause.details["pattern"], _values(cause, "sectors_growth")[1]
    if pattern == "misaligned":
        return "misaligned, each warp touches a sector more"
    if pattern == "scattered":
        return f"stride {ratio:.0f} or more, or scattered: each element has a sector of its own"
    if pattern == "stride":
        return f"stride {ratio:.0f}"
    used = _pair(cause, f"used_of_{noun}")
    shares = (
        f", threads use {100 * used[0]:.0f} → {100 * used[1]:.0f} % of their bytes" if used else ""
    )
    return f"{ratio:.3g} times the sectors for the same bytes, accesses are less coalesced{shares}"


def _kept_by_l1(cause: Cause) -> str:
    kept = cause.details.get("kept_by_l1")
    if kept is None:
        return ""
    if kept == "all":
        return "; L1 keeps that from L2"
    unknown = (
        ", and whether that is more data was not counted" if kept == "part, or more data" else ""
    )
    return f"; L1 keeps a part from L2, which is asked for {format_share(_growth(_values(cause, 'asked_of_l2')))} more{unknown}"


def _more_bytes(cause: Cause) -> str:
    parts = []
    if declared := _pair(cause, "declared"):
        parts.append(f"declared {short_bytes(declared[0])} → {short_bytes(declared[1])}")
    if dram := _pair(cause, "dram"):
        parts.append(f"DRAM {short_bytes(dram[0])} → {short_bytes(dram[1])}{_hit_rate(cause)}")
    if asked := _pair(cause, "asked_of_l2"):
        kernels = [
            f"{name} {short_bytes(now or 0)} more"
            for name, (_, now) in cause.figures.items()
            if name.endswith((" reads", " writes"))
        ]
        parts.append(
            f"asked of L2 {short_bytes(asked[0])} → {short_bytes(asked[1])}{'; ' if kernels else ''}{', '.join(kernels)}"
        )
    details = cause.details
    wider = f" ({details['type']} where it was {details['type_was']})" if "type" in details else ""
    besides = " besides sectors used in part" if "besides" in details else ""
    grown = format_share(_values(cause, "bytes_growth")[1] - 1, sign=True)
    return f"{grown} bytes to move{wider}{besides}: {', '.join(parts)}"


def _l2_misses(cause: Cause) -> str:
    dram = (
        f"DRAM bytes {format_share(_growth(_values(cause, 'dram')), sign=True)}{_hit_rate(cause)}"
    )
    if over := _pair(cause, "dram_over_l2_reads"):
        return f"{dram}: DRAM reads {over[1]:.2g} times what the SMs read, because sectors that stores fill in part are read first"
    grown = _values(cause, "bytes_growth")[1] - 1
    asked = f"with {format_share(grown, sign=True)} to move" if grown else "with as much to move"
    return f"{dram} {asked}: what L2 served comes from DRAM, the working set no longer fits or is visited in another order"


def _fewer_threads(cause: Cause) -> str:
    (was, now), blocks, threads = (
        _values(cause, name) for name in ("resident_share", "blocks", "threads_per_block")
    )
    return (
        f"{_kernel(cause)}grid {blocks[0]:.0f} × {threads[0]:.0f} → {blocks[1]:.0f} × {threads[1]:.0f}: the launch fills "
        f"{100 * now:.3g} % of the device's threads where it was {100 * was:.3g} %"
    )


def _occupancy(cause: Cause) -> str:
    was, now = _values(cause, "occupancy")
    moved = []
    for name, words in (("registers", "registers"), ("threads_per_block", "threads of a block")):
        if (pair := _pair(cause, name)) and pair[0] != pair[1]:
            moved.append(f"{words} {pair[0]:.0f} → {pair[1]:.0f}")
    why = f" ({', '.join(moved)})" if moved else ""
    return (
        f"{_kernel(cause)}occupancy {100 * was:.0f} → {100 * now:.0f} %{why}: fewer loads in flight"
    )


def _lost_overlap(cause: Cause) -> str:
    (was, now), (_, moved) = _values(cause, "at_once"), _values(cause, "moved")
    streams = cause.details["streams"]
    to = (
        f": {counted(round(moved), 'launch')} moved to stream {streams}"
        if moved and streams.isdigit()
        else ""
    )
    return f"kernels that overlapped run in turn{to}, {format_time(was)} → {format_time(now) if now else '0 s'} at once"


def _other_code(cause: Cause) -> str:
    was, now = _values(cause, "kernel_seconds")
    instead = f" in place of {cause.details['was']}" if "was" in cause.details else ""
    what = cause.details["changed"] or "other machine code"
    return f"{cause.details['kernel']}{instead}: {what}, {format_time(was)} → {format_time(now)} in the kernel"


def _clock(cause: Cause) -> str:
    name = "SM" if "sm_clock" in cause.figures else "memory"
    was, now = _values(cause, f"{name.lower()}_clock")
    why = f" ({cause.details['throttle_reasons']})" if "throttle_reasons" in cause.details else ""
    return f"{name} clock {was / 1e6:.0f} → {now / 1e6:.0f} MHz{why}: not the code"


SENTENCES: Mapping[str, Callable[[Cause], str]] = {
    "window gone": _window_gone,
    "thrashing": _thrashing,
    "keeps less": _keeps_less,
    "set-aside too large": _set_aside_too_large,
    "page faults": _page_faults,
    "migrations": _migrations,
    "stays on the host": _stays_on_host,
    "pageable": _pageable,
    "more copies": _more_copies,
    "more kernels": _more_kernels,
    "access pattern": _access_pattern,
    "more bytes": _more_bytes,
    "L2 misses": _l2_misses,
    "fewer threads": _fewer_threads,
    "occupancy": _occupancy,
    "lost overlap": _lost_overlap,
    "other code": _other_code,
    "SM clock": _clock,
    "memory clock": _clock,
}
"""By the name of the rule."""
