"""The page of an evaluation: what is in it, and how it behaves in a browser."""

import re
import shutil
import zlib

import numpy as np
import pytest
import torch
from conftest import DATA

from codec.evaluate import Evaluation, evaluate, write_page
from codec.evaluate.coders import CodecCoder, Original
from codec.evaluate.figures import Point, difference, levels, rate_plot, spectrogram

CLIPS = [DATA / "speech_it_male_first-in-queue_16k.wav", DATA / "music_guitar-chord_stereo_44k.flac"]
CLIPS.append(DATA / "speech_ru_female_first-in-queue_16k.flac")


@pytest.fixture(scope="module")
def evaluation(lookahead_codec, tmp_path_factory) -> Evaluation:
    folder = tmp_path_factory.mktemp("a <b> & c")
    return evaluate([lookahead_codec], CLIPS, folder, metrics=["si_sdr", "mel_distance"], max_seconds=1.0)


@pytest.fixture(scope="module")
def page(evaluation, lookahead_codec):
    evaluation.rows[-1]["undefined"] = "<script>alert(1)</script>"
    return write_page(evaluation, coders=[Original(), CodecCoder(lookahead_codec)], title="Trial <1>")


def test_the_page_needs_nothing_else(page):
    text = page.read_text()
    assert not re.search(r"https?:|src=\"(?!data:)|href=\"(?!data:|#)|@import|url\(", text)
    assert "<title>Trial &lt;1&gt;</title>" in text
    assert "<script>alert" not in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_best_median_and_worst_clip_can_be_heard(page, evaluation):
    text = page.read_text()
    ranked = [key for key, _ in evaluation.ranked_clips()]
    assert len(ranked) == 3
    for name, key in zip(("best", "median", "worst"), ranked, strict=True):
        assert f"The {name} clip: {key}" in text
    assert text.count("<audio") == 3 * 4  # original, 1, 2 and 4 codebooks
    assert text.count('alt="Spectrogram of') == 12
    assert text.count('alt="Difference of') == 9


def test_players_hold_the_aligned_copies(page, lookahead_codec):
    import base64
    import io

    import soundfile

    from codec import read_audio

    sounds = re.findall(r'aria-label="([^"]*)" src="data:audio/flac;base64,([^"]*)"', page.read_text())
    assert len(sounds) == 12
    waves = {label: soundfile.read(io.BytesIO(base64.b64decode(data)))[0] for label, data in sounds}
    assert {wave.shape[0] for wave in waves.values()} == {16000}
    ranked = next(name for name in ("best", "median", "worst") if f"The {name} clip: speech_it" in page.read_text())
    wave = read_audio(CLIPS[0], num_samples=16000)[0]
    assert np.abs(waves[f"original, the {ranked} clip"] - wave[0].numpy()).max() < 1e-4


def test_clips_are_ranked_by_quality(evaluation):
    ranked = evaluation.ranked_clips()
    means = {}
    for row in evaluation.rows:
        if row["condition"] != "original":
            means.setdefault(row["key"], []).append(row["si_sdr"])
    assert [key for key, _ in ranked] == sorted(means, key=lambda key: -sum(means[key]))


def _pixels(png):
    """`[rows, columns]` colour indices, the top row first."""
    width, height = np.frombuffer(png[16:24], ">u4")
    start = png.index(b"IDAT") + 4
    length = int.from_bytes(png[start - 8 : start - 4], "big")
    return np.frombuffer(zlib.decompress(png[start : start + length]), "u1").reshape(height, width + 1)[:, 1:]


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_a_tone_is_bright_where_it_is(rate):
    time = torch.arange(rate) / rate
    values = levels(torch.sin(2 * np.pi * 1000 * time)[None] * 0.5, rate)
    pixels = _pixels(spectrogram(values, float(values.max())))
    assert pixels.shape[0] == 96
    assert pixels.shape[1] <= 320
    brightest = 95 - int(pixels[:, 40].argmax())

    def mel(hz):
        return hz / (200 / 3) if hz < 1000 else 15 + np.log(hz / 1000) / np.log(6.4) * 27

    assert brightest == pytest.approx(97 * mel(1000) / mel(rate / 2) - 1, abs=1.5)
    assert pixels[:, 40].max() == 63
    assert pixels[5, 40] == 0


def test_differences_are_red_where_louder():
    reference = np.zeros((4, 5))
    copy = reference.copy()
    copy[0], copy[1], copy[2] = 30, -30, -500
    pixels = _pixels(difference(reference, copy, 0.0))
    assert pixels[3, 0] == 63  # the first row is at the bottom
    assert pixels[2, 0] == 0
    assert pixels[1, 0] == 0
    assert pixels[0, 0] == 32
    quiet = difference(np.full((2, 2), -90.0), np.full((2, 2), -200.0), 0.0)
    assert (_pixels(quiet) == 32).all()  # both below what is shown


@pytest.mark.parametrize("value", [1.0, 0.0, -3.5])
def test_a_plot_of_a_single_point(value):
    svg = rate_plot("x <y>", "z", {"a": [Point("a & b", 4.0, value, None, None)], "b": []}, 2)
    assert "x &lt;y&gt;" in svg and "a &amp; b" in svg
    assert "nan" not in svg and "inf" not in svg
    assert svg.count("<circle") == 1


def _chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    with api.sync_playwright() as playwright:
        options = {"args": ["--no-sandbox", "--autoplay-policy=no-user-gesture-required"]}
        try:
            browser = playwright.chromium.launch(executable_path=_chromium(), **options)
        except api.Error as error:
            pytest.skip(f"needs Chromium: apt-get install chromium, or playwright install chromium ({str(error)[:80]})")
        yield browser
        browser.close()


@pytest.fixture
def tab(browser, page):
    """The page, opened from disk, offline; anything on the console is a failure."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    messages = []
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.on("requestfailed", lambda request: messages.append(request.url[:100]))
    tab.goto(page.as_uri())
    yield tab
    context.close()
    assert messages == []


def test_the_page_loads_without_errors(tab):
    assert tab.title() == "Trial <1>"
    assert tab.locator("svg").count() == 2
    broken = "[...document.images].filter((i) => !i.complete || !i.naturalWidth).length"
    assert tab.evaluate(broken) == 0


def test_players_play(tab):
    assert tab.locator("audio").count() == 12
    played = tab.evaluate(
        """async () => {
            const out = [];
            for (const player of [...document.querySelectorAll("audio")].slice(0, 4)) {
                player.muted = true;
                player.playbackRate = 0.25;
                await player.play();
                for (let wait = 0; wait < 200 && player.currentTime === 0; wait++) {
                    await new Promise((done) => setTimeout(done, 50));
                }
                out.push([player.duration, player.currentTime > 0, player.error === null]);
            }
            return [out, [...document.querySelectorAll("audio")].filter((p) => !p.paused).length];
        }"""
    )
    assert all(abs(duration - 1) < 0.01 and moved and fine for duration, moved, fine in played[0])
    assert played[1] == 1  # starting one stops the others


def test_another_copy_goes_on_at_the_same_place(tab):
    place = tab.evaluate(
        """async () => {
            const [a, b] = document.querySelectorAll("audio");
            a.muted = b.muted = true;
            a.playbackRate = b.playbackRate = 0.1;
            await a.play();
            a.currentTime = 0.6;
            await b.play();
            return b.currentTime;
        }"""
    )
    assert 0.55 < place < 0.95


def _column(tab, index):
    cells = tab.locator(f"#summary tbody td:nth-child({index + 1})")
    return [cells.nth(i).get_attribute("data-value") or cells.nth(i).inner_text() for i in range(cells.count())]


def test_sorting_sorts_by_keyboard(tab):
    heading = tab.locator("#summary th", has_text="mel distance")
    index = heading.evaluate("h => [...h.parentNode.children].indexOf(h)")
    heading.locator("button").focus()
    tab.keyboard.press("Enter")
    rising = [float(v) for v in _column(tab, index)]
    assert rising == sorted(rising)
    assert heading.get_attribute("aria-sort") == "ascending"
    tab.keyboard.press("Space")
    assert [float(v) for v in _column(tab, index)] == sorted(rising, reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"
    tab.locator("#summary th button").first.click()
    assert _column(tab, 0) == ["small@1", "small@2", "small@4"]
    assert heading.get_attribute("aria-sort") is None


def test_undefined_values_stay_last(tab):
    tab.locator("details").evaluate("d => (d.open = true)")
    heading = tab.locator("#clips th", has_text="SI-SDR")
    index = heading.evaluate("h => [...h.parentNode.children].indexOf(h)")
    for _ in range(2):
        heading.locator("button").click()
        cells = tab.locator(f"#clips tbody td:nth-child({index + 1})")
        values = [cells.nth(i).get_attribute("data-value") for i in range(cells.count())]
        assert values[-3:] == ["", "", ""]  # the originals
        assert "" not in values[:-3]


def test_other_statistics_can_be_shown(tab, evaluation):
    tab.select_option("#statistic", "worst")
    shown = tab.locator("#summary tbody tr", has_text="small@4").locator("td[data-worst]").first.inner_text()
    assert shown == f"{evaluation.statistic('small@4', 'si_sdr').worst:.1f}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(browser, page, scheme):
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True)
    tab = context.new_page()
    tab.goto(page.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    channels = tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(channels) < 60) == (scheme == "dark")
    context.close()
