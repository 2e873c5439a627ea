"""Make the audio clips of this folder, their SOURCES.md and their licence texts from Debian's packages.

    python tests/data/make.py [-o FOLDER] [--cache DIR]

The clips are committed, so nobody needs to run this; it is here so that everyone can see (and redo) where
each comes from. Other versions of ffmpeg's encoders give other bytes, but the same clips.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import soundfile

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "recipes" / "corpora"))
import debian_speech  # noqa: E402

FADE_SECONDS = 0.02  # where a clip is cut out of something longer
ENCODERS = {
    "16-bit WAV": ("wav", ["-c:a", "pcm_s16le"]),
    "24-bit WAV": ("wav", ["-c:a", "pcm_s24le"]),
    "FLAC": ("flac", ["-c:a", "flac", "-compression_level", "12", "-sample_fmt", "s16"]),
    "Ogg Vorbis": ("ogg", ["-c:a", "libvorbis", "-q:a", "4"]),
    "Opus": ("opus", ["-c:a", "libopus", "-b:a", "40k"]),
    "MP3": ("mp3", ["-c:a", "libmp3lame", "-b:a", "96k"]),
}
PACKAGES = {package.name: package for package in debian_speech.SPEECH + debian_speech.MUSIC}
ITALIAN = "asterisk-core-sounds-it-g722"
RUSSIAN = "asterisk-core-sounds-ru-g722"
SAMPLES = "sonic-pi-samples"


@dataclass(frozen=True)
class Clip:
    """One committed file and how it is made."""

    name: str  # kind, language and voice, content, rate
    sources: tuple[tuple[str, str], ...]  # package and file in it; two become left and right
    encoding: str
    sample_rate: int | None = None  # None keeps the source's
    seconds: float | None = None  # None keeps all of it
    about: str = ""

    @property
    def file_name(self) -> str:
        """Name with the suffix of its format."""
        return f"{self.name}.{ENCODERS[self.encoding][0]}"

    @property
    def changes(self) -> str:
        """What was done to the source: the licences ask for it."""
        steps = ["decoded from G.722"] if self.sources[0][1].endswith("g722") else []
        steps += ["two prompts joined as left and right channel"] if len(self.sources) == 2 else []
        steps += [f"cut to its first {self.seconds:g} s with a short fade-out"] if self.seconds else []
        steps += [f"resampled to {self.sample_rate} Hz"] if self.sample_rate else []
        return ", ".join([*steps, f"stored as {self.encoding}"])


def italian(title: str, prompt: str, encoding: str, sample_rate: int = 16000) -> Clip:
    """A prompt in the male voice."""
    return prompt_clip(f"speech_it_male_{title}", ITALIAN, prompt, encoding, sample_rate)


def russian(title: str, prompt: str, encoding: str, sample_rate: int = 16000) -> Clip:
    """A prompt in the female voice."""
    return prompt_clip(f"speech_ru_female_{title}", RUSSIAN, prompt, encoding, sample_rate)


def prompt_clip(name: str, package: str, prompt: str, encoding: str, sample_rate: int) -> Clip:
    """A prompt, all of it; prompts are at 16 kHz."""
    resampled = None if sample_rate == 16000 else sample_rate
    return Clip(f"{name}_{sample_rate // 1000}k", ((package, f"{prompt}.g722"),), encoding, sample_rate=resampled)


def sample(
    name: str,
    source: str,
    encoding: str,
    about: str,
    sample_rate: int | None = None,
    seconds: float | None = None,
) -> Clip:
    """One of the samples that Sonic Pi ships."""
    return Clip(f"music_{name}", ((SAMPLES, f"{source}.flac"),), encoding, sample_rate, seconds, about)


CLIPS = (
    italian("first-in-queue", "queue-youarenext", "16-bit WAV"),
    italian("nobody-available", "vm-nobodyavail", "FLAC"),
    italian("thanks", "demo-thanks", "Ogg Vorbis", 22050),
    italian("enter-your-number", "privacy-prompt", "16-bit WAV", 8000),
    russian("first-in-queue", "queue-youarenext", "FLAC"),
    russian("number-switched-off", "ss-noservice", "MP3"),
    russian("thanks", "demo-thanks", "Opus", 48000),
    russian("please-hold", "priv-introsaved", "FLAC", 44100),
    Clip(
        "speech_it-left_ru-right_first-in-queue_22k",
        ((ITALIAN, "queue-youarenext.g722"), (RUSSIAN, "queue-youarenext.g722")),
        "FLAC",
        sample_rate=22050,
    ),
    sample("guitar-chord_stereo_44k", "guit_em9", "FLAC", "guitar, an Em9 chord", seconds=4.0),
    sample("guitar-harmonics_mono_44k", "guit_harmonics", "FLAC", "guitar, harmonics", seconds=2.5),
    sample("piano_stereo_48k", "ambi_piano", "Ogg Vorbis", "piano", sample_rate=48000),
    sample("electronic-loop_stereo_44k", "loop_garzul", "MP3", "synthesizer loop", seconds=6.0),
    sample("tabla-loop_stereo_48k", "loop_tabla", "Opus", "tabla loop", sample_rate=48000, seconds=5.0),
    sample("percussion-swash_stereo_44k", "perc_swash", "24-bit WAV", "percussion, 24 bits at its source"),
)


def encode(clip: Clip, sources: Sequence[Path], target: Path) -> None:
    """Join, cut, resample and encode in one go, without metadata that would change from run to run."""
    inputs: list[str | Path] = []
    for path in sources:
        inputs += [*(["-f", "g722"] if path.suffix == ".g722" else []), "-i", path]
    steps = ["[0]apad[left];[left][1]amerge"] if len(sources) == 2 else ["[0]anull"]
    if clip.seconds:
        start = clip.seconds - FADE_SECONDS
        steps.append(f"atrim=end={clip.seconds},afade=type=out:start_time={start}:duration={FADE_SECONDS}")
    steps += [f"aresample={clip.sample_rate}"] if clip.sample_rate else []
    command = ["ffmpeg", "-v", "error", "-nostdin", "-y", *inputs, "-filter_complex", ",".join(steps)]
    exact = ["-map_metadata", "-1", "-fflags", "+bitexact", "-flags:a", "+bitexact"]
    debian_speech.run([*command, *exact, *ENCODERS[clip.encoding][1], target])


def notices(copyright_text: str, paths: Sequence[str]) -> list[str]:
    """The stanzas of a copyright file that are about one of the files, verbatim."""
    stanzas = re.split(r"\n\s*\n", copyright_text)
    parsed = [(stanza.strip(), debian_speech.parse_copyright(stanza)) for stanza in stanzas]
    return [
        stanza
        for stanza, found in parsed
        if found and any(PurePosixPath(path).match(glob) for glob in found[0][0] if glob != "*" for path in paths)
    ]


def licence_text(copyright_text: str, name: str) -> str:
    """The full text of a licence in a machine-readable copyright file."""
    found = re.findall(rf"^License: {re.escape(name)}\n(?:[ \t].*\n?)+", copyright_text, re.MULTILINE)
    if not found:
        raise debian_speech.CorpusError(f"the copyright file has no text of the licence {name}")
    return str(max(found, key=len)).strip()


def licence_page(tree: Path, package: str, licence: str) -> str:
    """Authors' notices and licence text for the clips from one package, as the package has them."""
    text = debian_speech.read_copyright(PACKAGES[package], tree)
    sources = [source for clip in CLIPS for source in clip.sources]
    paths = [PACKAGES[name].source_prefix + file for name, file in sources]
    return "\n\n".join([*notices(text, paths), licence_text(text, licence)]) + "\n"


def source_lines(package: str, file: str, unpack: Callable[[str], Path]) -> list[str]:
    """Where a source is from, whose it is, and what it says."""
    entry = PACKAGES[package]
    tree = unpack(package)
    licence = debian_speech.licence_reader(entry, debian_speech.read_copyright(entry, tree))(PurePosixPath(file))
    lines = [
        f"- from Debian package {package}: `{entry.root}/{file}`",
        f"- copyright {licence.holders}; {licence.name}",
    ]
    if entry.texts_of and entry.text_package:
        text = entry.texts_of(unpack(entry.text_package))[file.removesuffix(".g722")]
        lines.append(f"- says: “{' '.join(text.split())}”")
    return lines


def section(clip: Clip, path: Path, unpack: Callable[[str], Path]) -> list[str]:
    """SOURCES.md's section about one clip."""
    info = soundfile.info(path)
    lines = [f"## {clip.file_name}", "", *([f"- {clip.about}"] if clip.about else [])]
    for package, file in clip.sources:
        lines += source_lines(package, file, unpack)
    channels = "mono" if info.channels == 1 else "stereo"
    size = path.stat().st_size
    lines.append(f"- {clip.encoding}, {info.samplerate} Hz, {channels}, {info.duration:.3f} s, {size} bytes")
    return [*lines, f"- changes: {clip.changes}", ""]


INTRODUCTION = """\
# Sources of the audio clips in this folder

Made by `make.py` from Debian packages; it writes this page too. The authors' notices and the licence texts
are in `licenses/`, as the packages have them. The spoken clips are CC-BY-3.0: whoever passes them on keeps
the names, the licence and the note of changes. The voices are Carlo Flora (Italian, male;
http://www.segreterietelefoniche.it) and IvrvoiceRU (Russian, female; provided by Maxim Topal,
http://www.ivrvoice.ru); they endorse nothing here. The music is CC0.

**Never train on these voices**: `recipes/corpora/debian_speech.py` keeps all of both speakers, and the whole
package of the music, in its test split.
"""


def make(folder: Path, unpack: Callable[[str], Path]) -> None:
    """Write clips, licences and SOURCES.md."""
    lines = [INTRODUCTION]
    for clip in CLIPS:
        sources = [unpack(package) / PACKAGES[package].root / file for package, file in clip.sources]
        encode(clip, sources, folder / clip.file_name)
        lines += section(clip, folder / clip.file_name, unpack)
    for title, package, licence in (
        ("asterisk-core-sounds", ITALIAN, "CC-BY-3.0"),  # one copyright file for all languages
        (SAMPLES, SAMPLES, "CC0"),
    ):
        page = licence_page(unpack(package), package, licence)
        debian_speech.write_text(folder / "licenses" / f"{title}.txt", page)
    debian_speech.write_text(folder / "SOURCES.md", "\n".join(lines).rstrip() + "\n")


def main() -> int:
    """Run the script; 0 when all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=HERE, metavar="FOLDER")
    parser.add_argument("--cache", type=Path, default=debian_speech.default_cache(), metavar="DIR")
    options = parser.parse_args()
    try:
        debian_speech.require_tool("ffmpeg", "ffmpeg")
        options.cache.mkdir(parents=True, exist_ok=True)
        options.output.mkdir(parents=True, exist_ok=True)
        make(options.output, lambda package: debian_speech.unpack(package, options.cache))
    except (debian_speech.CorpusError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
