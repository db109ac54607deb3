"""Files that outlive a crash."""

import os
import stat

import pytest

from longhorizon import files


def test_a_file_is_on_disk_before_it_has_its_name_and_its_name_before_we_go_on(tmp_path, monkeypatch):
    seen, rename, sync = [], os.replace, os.fsync

    def replace(here, there):
        seen.append(f"renamed {here.name} to {there.name}")
        rename(here, there)

    def fsync(handle):
        size = os.fstat(handle)
        seen.append("folder" if stat.S_ISDIR(size.st_mode) else f"{size.st_size} bytes")
        sync(handle)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "fsync", fsync)
    for content in ("whole", b"whole", lambda file: file.write(b"whole")):
        files.write_aside(tmp_path / "a.json", content)
        assert (tmp_path / "a.json").read_text() == "whole"
    assert seen == ["5 bytes", "renamed a.json.part to a.json", "folder"] * 3


def test_what_cannot_be_written_leaves_what_was_there_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a"
    files.write_aside(path, "old")

    def fails(file):
        file.write(b"ne")
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        files.write_aside(path, fails)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert path.read_text() == "old"
    with pytest.raises(NotADirectoryError):
        files.write_aside(path / "b", "new")


def test_lines_are_whole(tmp_path):
    path = tmp_path / "journal.jsonl"
    assert files.whole_lines(path) == []
    for content, lines in ((b"", []), (b"torn", []), (b"a\n", [b"a"]), (b"a\n\nb\nto", [b"a", b"", b"b"])):
        path.write_bytes(content)
        assert files.whole_lines(path) == lines
    assert files.whole_lines(path, 3) == [b"b"]
