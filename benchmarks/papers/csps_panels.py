"""CSPS: our numbers of its figures. Those of section 5 are of the stored run of `csps_serving.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from csps import rates, rows
from csps_prompts import LENGTHS, decode_rate, mixed_rate, mixed_tbt_s, prefill, sarathi_tbt_s, sarathi_ttft_s
from csps_serving import CSA, MODELS, NTP, SARATHI, TP, TUNED, Case, stored
from panels import Panel

_TOKENS = (1000, 4000, 16_000, 64_000, 128_000, 256_000, 512_000, 1_000_000)
_RATIOS = {"14": ("TTFT", "TTFT"), "15": ("TBT", "TBT"), "16": ("response", "response time")}


def panels() -> list[Panel]:
    """Return the panels of Figs. 2, 3, 5, 10, 11 and 14 to 17."""
    cases = stored()
    return [*_chunks(), *_shares(), *_mixed(), *_ratios(cases), *_response(cases)]


def _chunks() -> list[Panel]:
    """Return times and throughputs of Sarathi-Serve with chunks of 256 (Figs. 2 and 3)."""
    ttft_s = sarathi_ttft_s(_TOKENS)
    lines: tuple[tuple[str, str, str, Callable[[int], float]], ...] = (
        ("Fig. 2, TTFT", "Sarathi-Serve, InternLM2.5: TTFT", "seconds", ttft_s.__getitem__),
        ("Fig. 2, TBT", "Sarathi-Serve, InternLM2.5: TBT", "seconds", sarathi_tbt_s),
        ("Fig. 3, prefill", "Sarathi-Serve: prefill", "tokens/s", lambda length: length / ttft_s[length]),
        ("Fig. 3, decode", "Sarathi-Serve: decode, full memory", "tokens/s", decode_rate),
    )
    return [_by_length(name, title, y, of) for name, title, y, of in lines]


def _mixed() -> list[Panel]:
    """Return decodes that share steps with prompts (Figs. 10 and 11)."""
    return [
        _by_length("Fig. 10", "SP, InternLM2.5: TBT in steps with prompts", "seconds", mixed_tbt_s),
        _by_length("Fig. 11", "the same: decode throughput, full memory", "tokens/s", mixed_rate),
    ]


def _by_length(name: str, title: str, y: str, of: Callable[[int], float]) -> Panel:
    ours = {"ours": [(length, of(length)) for length in _TOKENS]}
    return Panel(name=name, title=title, x="tokens", y=y, ours=ours, log="xy")


def _shares() -> list[Panel]:
    estimates = {name: [(n, prefill(model, tokens)) for n, tokens in LENGTHS.items()] for model, name in MODELS.items()}
    return [
        Panel(
            name=f"Fig. 5, {kind}",
            title=f"SP-NTP: {kind}",
            x="tokens",
            y="% of TTFT",
            ours={
                model: [(n, 100 * getattr(one.breakdown, part) / one.seconds) for n, one in of]
                for model, of in estimates.items()
            },
            bars=True,
        )
        for kind, part in (("messages", "exchange_s"), ("attention", "attention_s"))
    ]


def _ratios(cases: Sequence[Case]) -> list[Panel]:
    """Return times of Sarathi-Serve over those of CSPS (Figs. 14 to 16), and of SP-NTP over SP-TP."""
    found = []
    for figure, (key, name) in _RATIOS.items():
        kinds = {"alone": f"alone: by length / {SARATHI}", "served": f"served: {CSA} / {SARATHI}"}
        ours = {
            kind: [(case.name, row.ratios[key]) for case in cases for row in rows(case) if row.name == wanted]
            for kind, wanted in kinds.items()
        }
        title = f"{name} of Sarathi-Serve over CSPS"
        found.append(Panel(name=f"Fig. {figure}", title=title, x="", y="ratio", ours=ours, bars=True))
    return [*found, _systems(cases)]


def _systems(cases: Sequence[Case]) -> Panel:
    named = {"Sarathi-Serve": SARATHI, "tuned chunks": TUNED, "SP-NTP": NTP, "SP-NTP, sparse": CSA, "SP-TP": TP}
    return Panel(
        name="Fig. 15, systems",
        title="TBT of requests alone",
        x="",
        y="ms",
        ours={
            name: [(case.name, 1e3 * statistics.fmean(case.alone[system].tbt_s)) for case in cases]
            for name, system in named.items()
        },
        bars=True,
    )


def _response(cases: Sequence[Case]) -> list[Panel]:
    ratio = {case.name: rates(case) for case in cases}
    at_same_time = Panel(
        name="Fig. 17",
        title="request rate over Sarathi-Serve's, at twice its response time alone",
        x="",
        y="ratio",
        ours={"sparse SP-NTP": [(name, (by[CSA] or 0.0) / (by[SARATHI] or 1.0)) for name, by in ratio.items()]},
        bars=True,
    )
    curves = [
        Panel(
            name=f"Fig. 17, {case.name}",
            title=f"{case.name}: response time, 8 GPUs each",
            x="requests/s of 64 GPUs",
            y="seconds",
            ours={
                system: [(rate, by_system[system].response_s) for rate, by_system in sorted(case.served.items())]
                for system in (SARATHI, TUNED, NTP, CSA)
            },
            log="xy",
        )
        for case in cases
    ]
    return [at_same_time, *curves]
