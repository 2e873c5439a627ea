"""`codec info`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from codec.cli.common import AsJson, app, duration, out, print_facts, size_text


@app.command()
def info(
    path: Annotated[str, typer.Argument(help="A token store, an audio file, or a codec's name or folder.")],
    as_json: AsJson = False,
) -> None:
    """Say what a token store, an audio file or a checkpoint holds."""
    target = Path(path)
    if target.suffix == ".ctok" or (target.is_dir() and any(target.glob("*.ctok"))):
        from codec.tokens import TokenStore, summarise

        summary = summarise(TokenStore(path))
        facts = summary.to_dict()
        if not as_json:
            _print_summary(summary)
            return
    elif target.is_file():
        from codec.audio import audio_info

        facts = asdict(audio_info(target))
    else:
        from codec.loading import load_codec

        spec = load_codec(path).spec
        shared = {"codes_of": f"{spec.codes_of.name} ({spec.codes_of.weights_hash[:12]})"} if spec.codes_of else {}
        facts = {
            **spec.to_dict(),
            **shared,
            "bitrate_bps": float(spec.bitrate_bps),
            "frame_rate": float(spec.frame_rate),
        }
    if as_json:
        print(json.dumps(facts))
    else:
        print_facts(facts)


def _print_summary(summary: Any) -> None:
    s = summary
    print_facts(
        {
            "codec": f"{s.codec} ({s.weights_hash[:12]}), {s.sample_rate:,} Hz, {s.hop_length} samples per frame",
            "codebooks": f"{s.num_quantizers_stored} of {s.num_quantizers_codec}, {s.codebook_size:,} entries each",
            "items": f"{s.num_items:,} in {s.num_shards} shards, {duration(s.hours * 3600)}",
            "size": f"{size_text(s.num_bytes)}, {s.bits_per_second:,.0f} bits per second, "
            f"{s.times_smaller_than_pcm16:.1f} × smaller than 16-bit PCM",
        }
    )
    most = max((count for _, count in s.lengths), default=0)
    out.print("lengths")
    for low, count in s.lengths:
        out.print(f"  from {low:>6g} s  {count:>11,}  {'█' * max(1, 40 * count // most)}", markup=False)
    out.print(f"codebook usage, from {s.num_items_sampled:,} items")
    for level, usage in enumerate(s.usage):
        out.print(f"  {level:>2}  {usage.used_entries:>6,} entries used, {usage.entropy_bits:.2f} bits", markup=False)
