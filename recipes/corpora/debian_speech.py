"""Turn freely licensed recordings in Debian's packages into a training folder.

    python recipes/corpora/debian_speech.py -o FOLDER [--cache DIR] [--music] [--force]

About 10 hours of speech in some 35 languages, wideband (16 kHz and more), as 16-bit mono WAV:

    FOLDER/{train,valid,test,seen,foreign}/SPEAKER/NAME.wav
    FOLDER/manifest.jsonl     one line per file: path, key, split, speaker, language, licence, text ...
    FOLDER/LICENSES.md        who recorded what, under which licence, and what was changed
    FOLDER/licenses/          each package's own copyright file, verbatim

``--music`` adds about 1.9 hours of music in the same layout under FOLDER/music (own rates, own channels),
apart from the speech. The split is by speaker (by artist for music): a voice of ``valid``, ``test`` or ``foreign`` is
never trained on. ``foreign`` is a whole source kept out: acted voices, with microphones and rooms unlike any other's.
``seen`` holds a tenth of what the training voices say, chosen by its wording, so that the same words are never on both
sides.

Needs a Debian-like system (apt-get, dpkg) and ffmpeg. Run it again if it was interrupted:
what is there is kept.
"""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
import soundfile

MIN_SECONDS = 0.3
MIN_SAMPLE_RATE = 16000  # telephone-band recordings would teach a wideband codec to leave out the upper half
SILENCE_DBFS = -60.0  # RMS of the whole file
G722_SAMPLE_RATE = 16000
NUM_DECODERS = 2
SPLITS = ("train", "valid", "test", "seen", "foreign")
SEEN_SHARE = 0.1
UNREADABLE = "unreadable"

OGG_FIRST_PAGE = re.compile(rb"OggS\x00[\x02\x06]")  # the page that begins a logical stream

Pcm = npt.NDArray[np.int16]  # [samples, channels]


class CorpusError(Exception):
    """Something the person who runs the script can put right."""


class UnreadableError(CorpusError):
    """One source file can't be decoded; the others go on."""


# ------------------------------------------------------------------------------------ what is in the packages


@dataclass(frozen=True)
class Voice:
    """Who speaks (or plays) a file and in which language; ``name`` is the file's in the speaker's folder."""

    speaker: str
    language: str
    name: str


@dataclass(frozen=True)
class Package:
    """One Debian package of recordings: which files to take from it and how to read their names."""

    name: str
    root: str  # where the recordings are in the unpacked package
    suffixes: tuple[str, ...]
    voice_of: Callable[[PurePosixPath], Voice]  # from a path relative to root
    # debian/copyright speaks of upstream's paths; this prefix turns a file's name into one.
    source_prefix: str = ""
    # Where debian/copyright isn't machine-readable: licence, a phrase in it that confirms this, holders.
    declared: tuple[str, str, str] | None = None
    # Reads {path relative to root, without suffix: transcript} from the tree of `text_package` (or its own).
    texts_of: Callable[[Path], dict[str, str]] | None = None
    text_package: str | None = None
    # Relative paths that are not what this corpus is about, with the reason.
    skip: tuple[tuple[str, str], ...] = ()
    glob: str = "*"  # which file names are recordings at all


def slug(path: PurePosixPath) -> str:
    """A relative path as one portable file name, without its suffix."""
    return re.sub(r"[^\w.@-]+", "_", str(path.with_suffix("")), flags=re.ASCII).strip("_")


def prompt_voice(speaker: str, language: str) -> Callable[[PurePosixPath], Voice]:
    """All files of one speaker; the language goes into the name, since a speaker may have several."""
    return lambda path: Voice(speaker, language, f"{language}_{slug(path)}")


def kde_voice(game: str) -> Callable[[PurePosixPath], Voice]:
    """KDE's games have one folder per language, each by its own volunteer: a voice per game and language."""

    def voice_of(path: PurePosixPath) -> Voice:
        language = path.parts[0].replace("_", "-")
        return Voice(f"{game}-{language}", language, slug(path.relative_to(path.parts[0])))

    return voice_of


def fillets_voice(path: PurePosixPath) -> Voice:
    """Read the role from LEVEL/cs/[LEVEL-]ROLE-WORDS.ogg.

    The two fish, ``m`` (mala, small) and ``v`` (velka, big), speak in every level and are two voices. The
    meaning of the other roles' letters changes from level to level, and the package doesn't say which actors
    are behind them: they are one multi-speaker source.
    """
    parts = path.stem.split("-")
    level = path.parent.parent.name
    fish = {"m": "small", "v": "big"}
    role = next((fish[part] for part in parts[:2] if part in fish), None)
    if parts[0] == "sp":  # shared lines: sp-shout_small_00
        role = next((size for size in fish.values() if f"_{size}" in path.stem), role)
    return Voice(f"fillets-{role or 'others'}", "cs", f"{level}_{slug(PurePosixPath(path.name))}")


def tuxpaint_voice(path: PurePosixPath) -> Voice:
    """Read the language from THING_desc[_LANGUAGE].ogg; each was spoken by its own volunteer."""
    thing, _, rest = path.name.partition("_desc")
    language = rest.split(".")[0].strip("_").replace("_", "-") or "en"
    return Voice(f"tuxpaint-{language}", language, slug(path.parent / f"{thing}.ogg"))


def tuxpaint_texts(tree: Path) -> dict[str, str]:
    """Descriptions of the stamps: the first line is English, then ``LANGUAGE.utf8=...``."""
    root = tree / "usr/share/tuxpaint/stamps"
    texts = {}
    for file in root.rglob("*.txt"):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        stem = file.relative_to(root).with_suffix("").as_posix()
        if lines:
            texts[f"{stem}_desc"] = lines[0].strip()
        for line in lines[1:]:
            language, equals, text = line.partition(".utf8=")
            if equals:
                texts[f"{stem}_desc_{language}"] = text.strip()
    return texts


def gcin_voice(path: PurePosixPath) -> Voice:
    """Read voice and syllable from SYLLABLE/VOICE.ogg; the syllables' letters become their code points."""
    letters = [char if char.isascii() else f"{ord(char):04x}" for char in path.parent.name]
    return Voice(f"gcin-{path.stem}", "zh", "-".join(letters))


def hedgewars_voice(path: PurePosixPath) -> Voice:
    """A voice per folder: NAME or NAME_LANGUAGE; the plain ones are in English but for the Russian."""
    name, _, language = path.parts[0].partition("_")
    language = language or ("ru" if name == "Russian" else "en")
    return Voice(f"hedgewars-{slug(PurePosixPath(path.parts[0])).lower()}", language, slug(PurePosixPath(path.name)))


def artist(*artists: tuple[str, str]) -> Callable[[PurePosixPath], Voice]:
    """The artist whose pattern matches the file's name."""

    def voice_of(path: PurePosixPath) -> Voice:
        for pattern, who in artists:
            if fnmatch.fnmatch(path.name, pattern):
                return Voice(who, "", slug(path))
        raise CorpusError(f"{path}: no artist is known for this file; add one to {Path(__file__).name}")

    return voice_of


def festvox_texts(tree: Path) -> dict[str, str]:
    """Transcripts of a Festvox voice: ``( ru_0001 "text" )``; ``+`` marks a stressed vowel."""
    lines = next(tree.glob("usr/share/festival/voices/*/*/etc/txt.done.data")).read_text(encoding="utf-8")
    utterances = re.findall(r'^\(\s*(\S+)\s+"(.*)"\s*\)\s*$', lines, re.M)
    return {name: text.replace("+", "") for name, text in utterances}


def prompt_texts(tree: Path) -> dict[str, str]:
    """Transcripts of Asterisk's prompts: ``digits/1: one``, ``;`` comments, ``[description of a sound]``."""
    path = next(tree.glob("usr/share/doc/*/core-sounds-*.txt.gz"))
    with gzip.open(path, "rt", encoding="utf-8-sig", errors="replace") as file:
        pairs = [line.split(":", 1) for line in file if ":" in line and not line.startswith(";")]
    texts = {name.strip(): text.strip() for name, text in pairs}
    return {name: text for name, text in texts.items() if text and not re.fullmatch(r"[\[(<].*[\])>]", text)}


PROMPT_SKIPS = (
    ("silence/*", "silence prompt"),
    ("beep*", "tone"),
    ("confbridge-join.*", "tone"),
    ("confbridge-leave.*", "tone"),
    ("tt-monkeys.*", "monkeys, not speech"),
    ("*2tone*", "tone"),
)


def prompts(folder: str, speaker: str) -> Package:
    """Asterisk's prompts of one language, recorded as ``LANGUAGE_COUNTRY_SEX_NAME``."""
    language = folder[:2]
    return Package(
        name=f"asterisk-core-sounds-{language}-g722",
        root=f"usr/share/asterisk/sounds/{folder}",
        suffixes=(".g722",),
        voice_of=prompt_voice(speaker, language),
        source_prefix=f"{language}-",
        texts_of=prompt_texts,
        text_package=f"asterisk-core-sounds-{language}",
        skip=PROMPT_SKIPS,
    )


SPEECH = (
    prompts("it_IT_m_Carlo", "carlo-flora"),
    prompts("ru_RU_f_IvrvoiceRU", "ivrvoice-ru"),
    prompts("en_US_f_Allison", "allison-smith"),
    prompts("es_MX_f_Allison", "allison-smith"),
    prompts("fr_CA_f_June", "june-wallack"),
    Package(
        name="festvox-ru",
        root="usr/share/festival/voices/russian/msu_ru_nsh_clunits/wav",
        suffixes=(".wav",),
        voice_of=prompt_voice("festvox-ru-nsh", "ru"),
        texts_of=festvox_texts,
    ),
    Package(
        name="fillets-ng-data-cs",
        root="usr/share/games/fillets-ng/sound",
        suffixes=(".ogg",),
        voice_of=fillets_voice,
        declared=(
            "GPL-2.0-only",
            "version 2 dated June, 1991",
            "ALTAR interactive, Ivo Danihelka, Pavel Danihelka and others",
        ),
    ),
    Package(
        name="klettres-data",
        root="usr/share/klettres",
        suffixes=(".ogg",),
        voice_of=kde_voice("klettres"),
    ),
    Package(
        name="ktuberling-data",
        root="usr/share/ktuberling/sounds",
        suffixes=(".ogg", ".wav", ".opus"),
        voice_of=kde_voice("ktuberling"),
        skip=(("sr@*", "Serbian again, in another script"),),
    ),
    Package(
        name="tuxpaint-stamps-default",
        root="usr/share/tuxpaint/stamps",
        suffixes=(".ogg", ".wav"),
        glob="*_desc*",  # the others are the noises that the things make
        voice_of=tuxpaint_voice,
        texts_of=tuxpaint_texts,
    ),
    Package(
        name="gcin-voice",
        root="usr/share/gcin-voice/ogg",
        suffixes=(".ogg",),
        voice_of=gcin_voice,
        source_prefix="SYLLABLE/",
    ),
    Package(
        name="hedgewars-data",
        root="usr/share/games/hedgewars/Data/Sounds/voices",
        suffixes=(".ogg",),
        voice_of=hedgewars_voice,
        source_prefix="share/hedgewars/Data/Sounds/voices/",
    ),
)

MUSIC = (
    Package(
        name="sonic-pi-samples",
        root="usr/share/sonic-pi/samples",
        suffixes=(".flac",),
        voice_of=artist(("*", "sonic-pi")),
        source_prefix="etc/samples/",
    ),
    Package(
        name="singularity-music",
        root="usr/share/games/singularity/music",
        suffixes=(".ogg",),
        voice_of=artist(("*", "max-mccracken")),
        declared=("CC-BY-SA-3.0", "Attribution, ShareAlike", "Max McCracken"),
    ),
    Package(
        name="hyperrogue-music",
        root="usr/share/hyperrogue/music",
        suffixes=(".ogg",),
        voice_of=artist(("hr3-*", "shawn-parrotte"), ("hr-domina-*", "lincoln-domina"), ("hr-savino-*", "will-savino")),
        source_prefix="music/",
    ),
    Package(
        name="asterisk-moh-opsound-g722",
        root="usr/share/asterisk/moh",
        suffixes=(".g722",),
        voice_of=artist(
            ("macroform-*", "macroform"), ("manolo_camp-*", "manolo-camp"), ("reno_project-*", "reno-project")
        ),
        declared=(
            "CC-BY-SA-3.0",
            "Creative Commons Attribution-ShareAlike",
            "2009 Paul Shuler (Macroform); 2009 Manolo Camp; 2008 Reno Project",
        ),
    ),
)

MUSICIANS = ("sonic-pi", "max-mccracken", "shawn-parrotte", "macroform", "lincoln-domina", "will-savino")

# Everyone else is trained on. A language's two KDE games may share a volunteer, so they are on the same side.
HELD_OUT = {
    "carlo-flora": "test",
    "ivrvoice-ru": "test",
    "klettres-lt": "valid",
    "ktuberling-lt": "valid",
    "ktuberling-ca": "valid",
    "sonic-pi": "test",
    "reno-project": "test",
    "lincoln-domina": "test",
    "will-savino": "valid",
    "manolo-camp": "valid",
}


FOREIGN = ("hedgewars-",)


def split_of(speaker: str, words: str = "") -> str:
    """The split of what a speaker said; of a training voice, a tenth of all wordings is kept apart as "seen"."""
    if speaker.startswith(FOREIGN):
        return "foreign"
    if speaker in HELD_OUT or speaker in MUSICIANS:
        return HELD_OUT.get(speaker, "train")
    wording = " ".join(re.sub(r"[^\w\s]", " ", words.lower()).split())
    draw = int.from_bytes(hashlib.sha256(wording.encode()).digest()[:8]) / 2**64
    return "seen" if draw < SEEN_SHARE else "train"


# ------------------------------------------------------------------------------- Debian packages and licences


def require_tool(name: str, package: str) -> None:
    """Say what to do about a missing program before hours are spent."""
    if shutil.which(name) is None:
        raise CorpusError(
            f"{name} was not found on the PATH. This script unpacks Debian packages: run it on "
            f"Debian or Ubuntu (a container is enough) and install the package '{package}'."
        )


def run(command: Sequence[str | Path], cwd: Path | None = None) -> bytes:
    """Run a program; its own words go into the error."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, check=False)
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip() or "it said nothing"
        raise CorpusError(f"'{' '.join(map(str, command))}' failed with exit code {done.returncode}: {words}")
    return done.stdout


def fetch_deb(name: str, cache: Path) -> Path:
    """The package's .deb file, from the cache or by ``apt-get download``."""
    debs = sorted(cache.glob(f"{name}_*.deb"), key=lambda path: path.stat().st_mtime)
    if debs:
        return debs[-1]
    require_tool("apt-get", "apt")
    print(f"downloading {name}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
        try:
            run(["apt-get", "download", name], cwd=Path(folder))
        except CorpusError as error:
            raise CorpusError(
                f"{error}\nCheck the network and the package lists ('apt-get update'), "
                f"or put {name}_VERSION.deb into {cache}."
            ) from None
        deb = next(Path(folder).glob("*.deb"))
        return deb.rename(cache / deb.name)


def unpack(name: str, cache: Path) -> Path:
    """The package's tree; unpacked under another name first, so that half a tree is never used."""
    deb = fetch_deb(name, cache)
    tree = cache / "unpacked" / deb.stem
    if not tree.is_dir():
        require_tool("dpkg", "dpkg")
        tree.parent.mkdir(exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=tree.parent, prefix=".partial-"))
        try:
            run(["dpkg", "-x", deb, partial])
            partial.rename(tree)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return tree


@dataclass(frozen=True)
class Licence:
    """What a package's debian/copyright says about one file."""

    name: str
    holders: str


def parse_copyright(text: str) -> list[tuple[list[str], Licence]]:
    """The Files stanzas of a machine-readable debian/copyright (DEP-5), in order."""
    stanzas = []
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        field = ""
        for line in stanza.splitlines():
            if line[:1].isspace():
                if field:
                    fields[field] += "\n" + line.strip()
            elif ":" in line:
                field, value = line.split(":", 1)
                fields[field] = value.strip()
        if "Files" in fields and "License" in fields:
            holders = "; ".join(fields.get("Copyright", "").split("\n")).strip("; ")
            stanzas.append((fields["Files"].split(), Licence(fields["License"].split("\n")[0], holders)))
    return stanzas


def licence_reader(package: Package, copyright_text: str) -> Callable[[PurePosixPath], Licence]:
    """A function from a file to its licence; the last matching stanza counts, as DEP-5 says."""
    if package.declared:
        name, evidence, holders = package.declared
        if " ".join(evidence.split()) not in " ".join(copyright_text.split()):
            raise CorpusError(
                f"{package.name}: its copyright file no longer says '{evidence}', so the licence {name} "
                f"can't be confirmed. Read the file and correct the package's entry in {Path(__file__).name}."
            )
        return lambda path: Licence(name, holders)
    stanzas = parse_copyright(copyright_text)

    def licence_of(path: PurePosixPath) -> Licence:
        source = package.source_prefix + path.name
        matching = [licence for globs, licence in stanzas if any(fnmatch.fnmatchcase(source, glob) for glob in globs)]
        if not matching:
            raise CorpusError(
                f"{package.name}: its copyright file names no licence for {source}, so it can't be used. "
                f"Skip it in the package's entry in {Path(__file__).name}."
            )
        return matching[-1]

    return licence_of


# ------------------------------------------------------------------------------------------- audio to 16 bits


def decode(path: Path, *, mono: bool) -> tuple[Pcm, int]:
    """Decode a file to 16-bit samples at its own rate."""
    if path.suffix == ".g722":
        return decode_g722(path), G722_SAMPLE_RATE
    try:
        wave, sample_rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise UnreadableError(f"{path}: {error}") from None
    if len(OGG_FIRST_PAGE.findall(path.read_bytes())) > 1:
        wave = decode_chained_ogg(path, int(sample_rate), wave.shape[1])
    if mono:
        wave = wave.mean(axis=1, keepdims=True)
    # Via float, so that peaks over full scale (common in Vorbis) are clipped and never wrap around.
    return np.clip(np.rint(wave * 32768.0), -32768, 32767).astype(np.int16), int(sample_rate)


def decode_chained_ogg(path: Path, sample_rate: int, channels: int) -> npt.NDArray[np.float32]:
    """Decode an Ogg file that is several, one after another: soundfile stops after the first."""
    form = ["-f", "f32le", "-ac", str(channels), "-ar", str(sample_rate)]
    try:
        data = run(["ffmpeg", "-v", "error", "-nostdin", "-i", str(path), *form, "-"])
    except CorpusError as error:
        raise UnreadableError(f"{path}: {error}") from None
    return np.frombuffer(data, dtype="<f4").astype(np.float32).reshape(-1, channels)


def decode_g722(path: Path) -> Pcm:
    """Decode G.722, which has no header and which soundfile doesn't know."""
    command = ["ffmpeg", "-v", "error", "-nostdin", "-f", "g722", "-i", str(path), "-f", "s16le", "-ac", "1"]
    try:
        data = run([*command, "-"])
    except CorpusError as error:
        raise UnreadableError(f"{path}: {error}") from None
    return np.frombuffer(data, dtype="<i2").astype(np.int16).reshape(-1, 1)


def read_wav(path: Path) -> tuple[Pcm, int] | None:
    """Read a WAV that an earlier run wrote; None where there is none, or a damaged one."""
    try:
        pcm, sample_rate = soundfile.read(path, dtype="int16", always_2d=True)
    except soundfile.SoundFileError:
        return None
    return pcm, int(sample_rate)


def write_wav(path: Path, pcm: Pcm, sample_rate: int) -> None:
    """Write under a temporary name, then rename: a WAV that is there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    soundfile.write(partial, pcm, sample_rate, format="WAV", subtype="PCM_16")
    os.replace(partial, path)


def write_text(path: Path, text: str) -> None:
    """Write a text file under a temporary name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def rms_dbfs(pcm: Pcm) -> float:
    """Root mean square in dB of full scale."""
    if pcm.size == 0:
        return -np.inf
    return float(10 * np.log10(np.mean((pcm / 32768.0) ** 2) + 1e-20))


def reason_to_drop(pcm: Pcm, sample_rate: int) -> str | None:
    """Why a decoded file is of no use, or None."""
    if sample_rate < MIN_SAMPLE_RATE:
        return f"sample rate under {MIN_SAMPLE_RATE} Hz"
    if len(pcm) < MIN_SECONDS * sample_rate:
        return f"shorter than {MIN_SECONDS} s"
    if rms_dbfs(pcm) < SILENCE_DBFS:
        return f"silent (RMS under {SILENCE_DBFS:g} dBFS)"
    return None


# ------------------------------------------------------------------------------------------------- the corpus


@dataclass(frozen=True)
class Recording:
    """A source file with all that its package tells about it."""

    source: Path
    package: str
    package_path: str
    voice: Voice
    split: str
    licence: Licence
    text: str | None
    skip: str | None

    @property
    def key(self) -> str:
        """Stable name, independent of the split."""
        return f"{self.voice.speaker}/{self.voice.name}"

    @property
    def path(self) -> str:
        """Where it goes, relative to the corpus."""
        return f"{self.split}/{self.key}.wav"


@dataclass(frozen=True)
class Entry:
    """One line of the manifest."""

    path: str
    key: str
    split: str
    speaker: str
    language: str
    package: str
    package_path: str
    licence: str
    copyright: str
    sample_rate: int
    channels: int
    num_samples: int
    text: str | None


@dataclass(frozen=True)
class Dropped:
    """A file that didn't make it, and why."""

    package: str
    package_path: str
    reason: str


def scan(package: Package, tree: Path, text_tree: Path | None = None) -> Iterator[Recording]:
    """All recordings of an unpacked package, in a stable order."""
    root = tree / package.root
    files = sorted(path for path in root.rglob(package.glob) if path.suffix in package.suffixes and path.is_file())
    if not files:
        raise CorpusError(
            f"{package.name}: no {'/'.join(package.suffixes)} files below {root}. If the package has "
            f"changed, correct its entry in {Path(__file__).name}; if its tree is damaged, delete {tree}."
        )
    licence_of = licence_reader(package, read_copyright(package, tree))
    texts = package.texts_of(text_tree or tree) if package.texts_of else {}
    for file in files:
        path = PurePosixPath(file.relative_to(root).as_posix())
        voice = package.voice_of(path)
        text = texts.get(str(path.with_suffix("")))
        yield Recording(
            source=file,
            package=package.name,
            package_path=file.relative_to(tree).as_posix(),
            voice=voice,
            split=split_of(voice.speaker, text or voice.name),
            licence=licence_of(path),
            text=text,
            skip=next((reason for glob, reason in package.skip if fnmatch.fnmatch(str(path), glob)), None),
        )


def read_copyright(package: Package, tree: Path) -> str:
    """The package's copyright file, where Debian's policy puts it."""
    return (tree / "usr/share/doc" / package.name / "copyright").read_text(encoding="utf-8", errors="replace")


def check_recordings(recordings: Sequence[Recording]) -> None:
    """Two sources must not claim one file, and no speaker may be on two sides of the split."""
    for path, count in Counter(item.path for item in recordings if not item.skip).items():
        if count > 1:
            sources = [item.package_path for item in recordings if item.path == path]
            raise CorpusError(f"{path} would be written from {count} sources ({', '.join(sources)}); name them apart")
    splits = defaultdict(set)
    for item in recordings:
        splits[item.voice.speaker].add(item.split)
    for speaker, found in splits.items():
        if len(found) > 1 and found != {"train", "seen"}:
            raise CorpusError(f"speaker {speaker} is in {' and '.join(sorted(found))}; a speaker belongs to one split")


def convert(recording: Recording, folder: Path, *, mono: bool, force: bool) -> tuple[Entry, str] | Dropped:
    """Write one recording unless it is there; return its manifest entry and a digest of its samples."""
    path = folder / recording.path
    kept = None if force else read_wav(path)
    try:
        pcm, sample_rate = kept or decode(recording.source, mono=mono)
    except UnreadableError as error:
        print(f"unreadable: {error}", file=sys.stderr)
        return Dropped(recording.package, recording.package_path, UNREADABLE)
    reason = reason_to_drop(pcm, sample_rate)
    if reason:
        return Dropped(recording.package, recording.package_path, reason)
    if not kept:
        write_wav(path, pcm, sample_rate)
    entry = Entry(
        path=recording.path,
        key=recording.key,
        split=recording.split,
        speaker=recording.voice.speaker,
        language=recording.voice.language,
        package=recording.package,
        package_path=recording.package_path,
        licence=recording.licence.name,
        copyright=recording.licence.holders,
        sample_rate=sample_rate,
        channels=pcm.shape[1],
        num_samples=len(pcm),
        text=recording.text,
    )
    return entry, hashlib.sha256(pcm.tobytes()).hexdigest()


def convert_all(
    recordings: Sequence[Recording], folder: Path, *, mono: bool, force: bool
) -> tuple[list[Entry], list[Dropped]]:
    """Convert in parallel; of files with the same samples the first is kept."""
    entries: list[Entry] = []
    dropped = [Dropped(item.package, item.package_path, item.skip) for item in recordings if item.skip]
    wanted = [item for item in recordings if not item.skip]
    first_with: dict[str, str] = {}
    with ThreadPoolExecutor(NUM_DECODERS) as pool:
        results = pool.map(lambda item: convert(item, folder, mono=mono, force=force), wanted)
        for number, result in enumerate(results, start=1):
            if number % 500 == 0 or number == len(wanted):
                print(f"{number}/{len(wanted)} files", file=sys.stderr)
            if isinstance(result, Dropped):
                dropped.append(result)
                continue
            entry, digest = result
            if first_with.setdefault(digest, entry.path) == entry.path:
                entries.append(entry)
            else:
                (folder / entry.path).unlink()
                dropped.append(Dropped(entry.package, entry.package_path, "same samples as another file"))
    return entries, dropped


def remove_strays(folder: Path, entries: Iterable[Entry], *, force: bool) -> None:
    """WAVs of another version of the script may be on the wrong side of the split: never leave them."""
    known = {entry.path for entry in entries}
    found = [path for split in SPLITS for path in sorted((folder / split).rglob("*.wav"))]
    strays = [path for path in found if path.relative_to(folder).as_posix() not in known]
    if strays and not force:
        raise CorpusError(
            f"{folder} holds {len(strays)} WAV files that don't belong to this corpus; one is "
            f"{strays[0]}. Use another folder, delete them, or run with --force, which deletes them."
        )
    for path in strays:
        path.unlink()
    for split in SPLITS:
        for partial in (folder / split).rglob(".*.partial"):  # of an interrupted run
            partial.unlink()


# ---------------------------------------------------------------------------------------------------- reports


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text with aligned columns; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def hours(entries: Iterable[Entry]) -> float:
    """Duration in hours."""
    return sum(entry.num_samples / entry.sample_rate for entry in entries) / 3600


def summary(entries: Sequence[Entry]) -> str:
    """Hours, voices, files and licences for each split and package."""
    rows = [["split", "package", "hours", "voices", "files", "licence"]]
    for split in SPLITS:
        part = [entry for entry in entries if entry.split == split]
        for package in dict.fromkeys(entry.package for entry in part):
            rows.append([split, package, *figures([entry for entry in part if entry.package == package])])
        rows.append([split, "all", *figures(part)])
    rows.append(["all", "all", *figures(entries)])
    return table(rows)


def figures(entries: Sequence[Entry]) -> list[str]:
    """The numeric columns of the summary, and the licences."""
    voices = {entry.speaker for entry in entries}
    licences = sorted({entry.licence for entry in entries})
    return [f"{hours(entries):.3f}", str(len(voices)), str(len(entries)), ", ".join(licences)]


def drop_summary(dropped: Sequence[Dropped]) -> str:
    """How many files were dropped, by package and reason."""
    counts = Counter((item.package, item.reason) for item in dropped)
    return table([["dropped", "package", "reason"], *([str(n), *pair] for pair, n in sorted(counts.items()))])


def licences_page(entries: Sequence[Entry], *, mono: bool) -> str:
    """LICENSES.md: attribution, licence and changes for each package."""
    lines = [
        "# Where these recordings come from",
        "",
        "Made by `recipes/corpora/debian_speech.py` from packages of Debian. What each package's own",
        "`debian/copyright` says is repeated here and kept verbatim, with the full licence texts, in",
        "`licenses/`. `manifest.jsonl` has it file by file.",
        "",
        "Changes made to every file: decoded to 16-bit PCM WAV"
        + (", channels averaged to mono" if mono else "")
        + "; renamed. Files too short, silent, duplicate, below 16 kHz or not of the kind were left out.",
        "",
    ]
    for package in dict.fromkeys(entry.package for entry in entries):
        part = [entry for entry in entries if entry.package == package]
        lines += [
            f"## {package}",
            "",
            f"{len(part)} files, {hours(part):.3f} hours; full text: `licenses/{package}.txt`",
            "",
        ]
        for licence, holders in dict.fromkeys((entry.licence, entry.copyright) for entry in part):
            count = sum((entry.licence, entry.copyright) == (licence, holders) for entry in part)
            lines.append(f"- {licence} ({count} files), copyright: {holders}")
        lines.append("")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- main


def build(
    packages: Sequence[Package],
    folder: Path,
    unpack_package: Callable[[str], Path],
    *,
    mono: bool,
    force: bool = False,
) -> tuple[list[Entry], list[Dropped]]:
    """Make one corpus; ``unpack_package`` gives the unpacked tree of a package by name."""
    recordings: list[Recording] = []
    for package in packages:
        tree = unpack_package(package.name)
        text_tree = unpack_package(package.text_package) if package.text_package else None
        recordings += scan(package, tree, text_tree)
        write_text(
            folder / "licenses" / f"{package.name}.txt",
            read_copyright(package, tree),
        )
    check_recordings(recordings)
    entries, dropped = convert_all(recordings, folder, mono=mono, force=force)
    remove_strays(folder, entries, force=force)
    lines = [json.dumps(asdict(entry), ensure_ascii=False) for entry in entries]
    write_text(folder / "LICENSES.md", licences_page(entries, mono=mono))
    # The manifest comes last: where it is, the corpus is complete.
    write_text(folder / "manifest.jsonl", "\n".join(lines) + "\n")
    return entries, dropped


def default_cache() -> Path:
    """The user's cache folder, by the XDG convention."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "codec" / "debian"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("-o", "--output", type=Path, required=True, metavar="FOLDER", help="where the corpus goes")
    option(
        "--cache",
        type=Path,
        default=default_cache(),
        metavar="DIR",
        help="where .deb files are kept (default: %(default)s)",
    )
    option("--music", action="store_true", help="also make FOLDER/music")
    option("--force", action="store_true", help="decode again what is there; delete WAVs that don't belong")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 when all went well."""
    options = parse_arguments(arguments)
    corpora: list[tuple[str, tuple[Package, ...], Path, bool]] = [("speech", SPEECH, options.output, True)]
    if options.music:
        corpora.append(("music", MUSIC, options.output / "music", False))
    num_unreadable = 0
    try:
        require_tool("ffmpeg", "ffmpeg")
        options.cache.mkdir(parents=True, exist_ok=True)
        for title, packages, folder, mono in corpora:
            entries, dropped = build(
                packages, folder, lambda name: unpack(name, options.cache), mono=mono, force=options.force
            )
            num_unreadable += sum(item.reason == UNREADABLE for item in dropped)
            print(f"\n{title}: {folder}\n\n{summary(entries)}\n\n{drop_summary(dropped)}")
    except (CorpusError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if num_unreadable:
        print(
            f"error: {num_unreadable} files could not be decoded (listed above); the corpus is whole without "
            f"them. Delete {options.cache / 'unpacked'} in case it is damaged, and run again.",
            file=sys.stderr,
        )
    return 1 if num_unreadable else 0


if __name__ == "__main__":
    sys.exit(main())
