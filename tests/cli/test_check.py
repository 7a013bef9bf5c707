# SPDX-License-Identifier: Apache-2.0
"""`penstock check` finds every file that cannot be decoded, and only those."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.cli import main

cv2 = pytest.importorskip("cv2")
pytest.importorskip("simplejpeg")
pytest.importorskip("rich")
Image = pytest.importorskip("PIL.Image")

ONE_WORKER = ["--workers", "1"]
HEIGHT, WIDTH = 24, 32

# Every file of the folder of real broken ones that is not good, and a word of the reason.
BROKEN = {
    "12bit_monkey.jpg": "no known kind",
    "bomb_65536-uint32-limit.png": "more than 100,000,000 pixels",
    "corrupt_pillow_broken.png": "no known kind",
    "corrupt_pillow_broken_data_stream.png": "unrecognized data stream",
    "corrupt_pillow_hopper_bad_exif.jpg": "Corrupt JPEG data: 1214 extraneous bytes",
    "corrupt_pillow_png_decompression_dos.png": "Decompressed data too large",
    "corrupt_pillow_unknown_compression_method.png": "no known kind",
    "corrupt_tv_corrupt.jpg": "Unsupported marker type 0xae",
    "empty_zero_bytes.jpg": "the file is empty",
    "html_404_page.jpg": "text, not an image: it begins with '<!DOCTYPE",
    "lfs_pointer.jpg": "text, not an image: it begins with 'version https://git-lfs",
    "lossless_dali_cat-3449999_640_grayscale_8bit.jpg": "Unsupported color conversion",
    "text_not_image.jpg": "text, not an image",
    "trunc_pillow_truncated_end_chunk.png": "Truncated File Read",
    "trunc_pillow_truncated_image.png": "image file is truncated",
    "trunc_pillow_truncated_jpeg.jpg": "Premature end of JPEG file",
    "trunc_sharp_truncated.png": "image file is truncated",
}
GOOD = {
    "16bit_gray_i_trns.png",
    "16bit_rgb_monkey.png",
    "16bit_rgba.png",
    "1x1_gray.jpg",
    "apng_single_frame.png",
    "arithmetic.jpg",
    "chan_gray_pytorch.jpg",
    "chan_gray_pytorch.png",
    "chan_grayalpha_pytorch.png",
    "chan_palette_pytorch.png",
    "chan_rgbalpha_pytorch.png",
    "cmyk_pillow.jpg",
    "cmyk_torchvision.jpg",
    "corrupt_pillow_multiple_exif.jpg",  # its pixels are whole
    "exif_2x1_orient8.jpg",
    "exif_landscape_6.jpg",
    "fuzz_dali_1.jpg",
    "fuzz_dali_2.jpg",
    "misnamed_dali_jpeg.png",
    "misnamed_dali_png.jpeg",
    "png_idat_after_end.png",
    "progressive_cat.jpg",
    "trunc_pillow_truncated_app14.jpg",  # so are these: a marker before them is short
    "webp_hopper.webp",
}


def write_image(path, **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
    Image.fromarray(noise).convert(how.pop("mode", "RGB")).save(path, **how)


def cut(path, keep):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])


@pytest.fixture
def folder(tmp_path):
    for position in range(12):
        write_image(tmp_path / "images" / f"class_{position % 3}" / f"{position:02}.jpg")
    return tmp_path / "images"


def run(capsys, *arguments):
    """Give exit code, [(path, reason), …] and stderr."""
    capsys.readouterr()
    code = main(["check", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, [tuple(line.split("\t")) for line in out.splitlines()], err


def command_for(folder, before=""):
    """Give the command line of a check in a process of its own."""
    script = (
        f"import sys; {before}\n"
        "from penstock.cli import main\n"
        f"sys.exit(main(['check', {str(folder)!r}, '--workers', '1']))"
    )
    return [sys.executable, "-c", script]


def test_a_sound_folder_gives_a_summary_and_status_0(folder, capsys):
    code, lines, err = run(capsys, folder, "--workers", 2)
    assert (code, lines) == (0, [])
    assert re.fullmatch(r"12 files, 0 broken, \d+\.\d s\n", err)


def test_broken_files_have_a_line_each_in_order_of_their_paths(folder, capsys):
    cut(folder / "class_1" / "01.jpg", 0.9)
    (folder / "class_0" / "empty.png").write_bytes(b"")
    (folder / "class_2" / "page.JPG").write_text("<html>404</html>")
    (folder / "notes.txt").write_text("no image, by its name")
    code, lines, err = run(capsys, folder, "--workers", 2)
    assert code == 1
    assert lines == [
        (str(folder / "class_0" / "empty.png"), "the file is empty"),
        (str(folder / "class_1" / "01.jpg"), "Premature end of JPEG file"),
        (
            str(folder / "class_2" / "page.JPG"),
            "text, not an image: it begins with '<html>404</html>'",
        ),
    ]
    assert err.startswith("14 files, 3 broken, ")


@pytest.mark.parametrize("keep", [0.4, 0.9, 0.99])
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("a.jpg", {}),
        ("progressive.jpg", {"progressive": True}),
        ("grey.jpg", {"mode": "L"}),
        ("cmyk.jpg", {"mode": "CMYK"}),
        ("a.png", {}),
        ("a.webp", {}),
        ("a.bmp", {}),
        ("a.ppm", {}),
        ("a.tif", {}),
        ("lzw.tiff", {"compression": "tiff_lzw"}),
    ],
)
def test_a_truncated_image_of_any_form_is_broken_and_a_whole_one_is_not(name, how, keep, tmp_path):
    from penstock.cli.decoding import sort_out_broken

    write_image(tmp_path / "whole" / name, **how)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    cut(tmp_path / "cut" / name, keep)
    paths = [tmp_path / "whole" / name, tmp_path / "cut" / name]
    good, broken = sort_out_broken(paths, num_threads=1)
    assert good == paths[:1]
    assert [file.path for file in broken] == paths[1:]


def test_damage_that_opencv_passes_over_is_found(tmp_path):
    from penstock.cli.decoding import count_pixels, read_image

    path = tmp_path / "a.tif"
    write_image(path, compression="tiff_adobe_deflate")
    data = bytearray(path.read_bytes())
    assert count_pixels(path) == HEIGHT * WIDTH
    data[len(data) // 2] ^= 0x41
    path.write_bytes(data)
    read_image(path)  # wrong colours, no error
    with pytest.raises(OSError, match="decoder error"):
        count_pixels(path)


def test_every_real_broken_file_has_its_verdict_and_the_good_ones_have_none(data_dir, capsys):
    named = {p.name for p in (data_dir / "broken").iterdir()}
    assert named - {"MANIFEST.tsv", "gif_hopper.gif"} == {*BROKEN, *GOOD}
    code, lines, err = run(capsys, data_dir / "broken", "--workers", 2)
    assert code == 1
    reasons = {Path(path).name: reason for path, reason in lines}
    assert set(reasons) == set(BROKEN)
    assert [name for name in BROKEN if BROKEN[name] not in reasons[name]] == []
    assert err.startswith(f"{len(BROKEN) + len(GOOD)} files, {len(BROKEN)} broken, ")


def test_decoders_write_nothing_to_the_terminal_themselves(tmp_path):
    write_image(tmp_path / "a.png")
    cut(tmp_path / "a.png", 0.5)
    done = subprocess.run(command_for(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == f"{tmp_path / 'a.png'}\timage file is truncated\n"
    assert re.fullmatch(r"1 files, 1 broken, \d+\.\d s\n", done.stderr)


def test_json_has_the_counts_and_every_broken_file(folder, capsys):
    (folder / "class_0" / "empty.png").write_bytes(b"")
    assert main(["check", str(folder), "--json", *ONE_WORKER]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record.pop("seconds") > 0
    assert record == {
        "num_files": 13,
        "num_checked": 13,
        "num_broken": 1,
        "broken": [
            {"path": str(folder / "class_0" / "empty.png"), "reason": "the file is empty"},
        ],
    }
    (folder / "class_0" / "empty.png").unlink()
    assert main(["check", str(folder), "--json", *ONE_WORKER]) == 0
    assert json.loads(capsys.readouterr().out)["broken"] == []


def test_a_name_that_is_no_text_stays_in_its_line_and_comes_whole_in_json(tmp_path, capsys):
    path = os.fsencode(tmp_path) + b"/a\n\tb\xe9.jpg"
    with open(path, "wb"):
        pass
    code, lines, _ = run(capsys, tmp_path, *ONE_WORKER)
    assert code == 1
    assert lines == [(f"{tmp_path}/a\\n\\tb\\udce9.jpg", "the file is empty")]
    assert main(["check", str(tmp_path), "--json", *ONE_WORKER]) == 1
    named = json.loads(capsys.readouterr().out)["broken"][0]["path"]
    assert os.fsencode(named) == path


def test_links_are_followed_and_what_is_no_file_is_broken(folder, tmp_path, capsys):
    (folder / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    os.mkfifo(folder / "pipe.jpg")
    write_image(tmp_path / "elsewhere" / "a.jpg")
    (tmp_path / "elsewhere" / "b.jpg").write_bytes(b"")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "class_0" / "round").symlink_to(folder)  # a ring
    code, lines, err = run(capsys, folder, *ONE_WORKER)
    assert code == 1
    assert lines == [
        (str(folder / "gone.jpg"), "No such file or directory"),
        (str(folder / "linked" / "b.jpg"), "the file is empty"),
        (str(folder / "pipe.jpg"), "not a regular file"),
    ]
    assert err.startswith("16 files, 3 broken, ")


def end_process_on_bad_names(path):
    """A decoder with a bug: some files kill their process, others make it leave."""
    from penstock.cli.decoding import count_pixels

    if "segfault" in path:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "exit" in path:
        os._exit(0)
    return count_pixels(path)


def test_a_file_that_ends_its_worker_is_broken_and_the_rest_is_checked(folder):
    from penstock.cli.survey import Findings, check_files

    for name in ("class_0/segfault.jpg", "class_1/segfault.jpg", "class_2/exit.jpg"):
        write_image(folder / name)
    (folder / "empty.jpg").write_bytes(b"")
    paths = sorted(str(path) for path in folder.rglob("*.jpg"))
    findings, seen = Findings(len(paths)), []
    check_files(
        paths,
        2,
        findings,
        tell=lambda so_far: seen.append((so_far.num_checked, len(so_far.broken))),
        decode=end_process_on_bad_names,
    )
    reasons = {str(file.path.relative_to(folder)): file.reason for file in findings.broken}
    assert reasons == {
        "class_0/segfault.jpg": "the process that decodes it was killed by SIGSEGV",
        "class_1/segfault.jpg": "the process that decodes it was killed by SIGSEGV",
        "class_2/exit.jpg": "the process that decodes it exited with code 0",
        "empty.jpg": "the file is empty",
    }
    assert findings.num_checked == len(paths) == 16
    assert seen == sorted(seen)  # it only ever grows


def test_a_check_that_is_interrupted_reports_what_it_has_found(folder, capsys, monkeypatch):
    from penstock.cli import survey

    def interrupted(paths, num_workers, findings, tell):
        findings.num_checked = 5
        for path in (paths[4], paths[2]):  # what ends its worker is known late
            findings.broken.append(survey.BrokenFile(Path(path), "the file is empty"))
        raise KeyboardInterrupt

    monkeypatch.setattr(survey, "check_files", interrupted)
    code, lines, err = run(capsys, folder)
    assert code == 130
    names = [str(folder / "class_0" / "06.jpg"), str(folder / "class_1" / "01.jpg")]
    assert lines == [(name, "the file is empty") for name in names]
    assert "stopped after 5 of 12 files, 2 broken" in err


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("{tmp}/nowhere", r"nowhere does not exist\. Name a folder"),
        ("{tmp}/file.jpg", r"file\.jpg is a file, not a folder"),
        ("{tmp}/empty", r"no image in .*empty or below it\. Looked for files ending in \.bmp"),
    ],
)
def test_a_folder_without_images_is_refused_with_what_to_do(argument, message, tmp_path, capsys):
    (tmp_path / "file.jpg").write_text("")
    (tmp_path / "empty").mkdir()
    code, lines, err = run(capsys, argument.format(tmp=tmp_path))
    assert (code, lines) == (1, [])
    assert "Traceback" not in err
    assert re.search(message, err.replace("\n", " "))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every folder")
def test_a_folder_that_cannot_be_listed_is_refused(folder, capsys):
    (folder / "class_1").chmod(0)
    try:
        code, _, err = run(capsys, folder)
    finally:
        (folder / "class_1").chmod(0o700)
    assert code == 1
    assert re.search(r"cannot list .*class_1: Permission denied\. Its images would be", err)


@pytest.mark.parametrize("option", [["--workers", "0"], ["--nonsense"]])
def test_a_wrong_option_gives_status_2(option, folder):
    assert main(["check", str(folder), *option]) == 2


@pytest.mark.parametrize(("module", "extra"), [("typer", "cli"), ("PIL", "cli,vision")])
def test_a_missing_extra_is_named(module, extra, folder):
    command = command_for(folder, before=f"sys.modules[{module!r}] = None")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f'pip install "penstock[{extra}]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_torch_is_not_needed(folder):
    command = command_for(folder, before="sys.modules['torch'] = None")
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 0


def test_a_bar_is_drawn_on_a_terminal(folder):
    ours, theirs = os.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    child = subprocess.Popen(command_for(folder), stdout=subprocess.PIPE, stderr=theirs, env=env)
    os.close(theirs)
    drawn = b""
    with child, open(ours, "rb", buffering=0) as terminal:
        while True:
            try:
                drawn += terminal.read(4096)
            except OSError:  # Linux' way to say that the other end is closed
                break
        assert child.stdout.read() == b""
    assert child.returncode == 0
    assert b"0 broken" in drawn
    assert b"/12" in drawn
