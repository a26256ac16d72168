"""Limits of containers on memory and cores, file systems without locks, and programs that are not scripts."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from conftest import ENVIRONMENT
from test_run_folder import SPLITS, tiny
from torchcaps import BadInput, process_memory
from torchcaps.environment import available_cores
from torchcaps.process_memory import free_memory
from torchcaps.run_folder import locked, read_run
from torchcaps.training import fit

MIB = 1 << 20


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A folder that takes the place of /sys/fs/cgroup, without limits."""
    monkeypatch.setattr(process_memory, "CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(process_memory, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path / "groups"


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.mark.skipif(free_memory() is None, reason="needs /proc/meminfo")
@pytest.mark.parametrize("version", [1, 2])
def test_memory_limits_of_all_control_groups_count_and_cached_files_are_free(version, groups, tmp_path):
    unlimited = free_memory()
    membership = "9:name=systemd:/\n4:memory:/job/step\n0::/\n" if version == 1 else "0::/job/step\n"
    (tmp_path / "membership").write_text(membership)
    assert free_memory() == pytest.approx(unlimited, rel=0.2)
    root = groups / "memory" if version == 1 else groups
    names = ("memory__limit_in_bytes", "memory__usage_in_bytes") if version == 1 else ("memory__max", "memory__current")
    none, cache = (1 << 63) - 1 if version == 1 else "max", "total_inactive_file" if version == 1 else "inactive_file"
    write(root / "job" / "step", **dict(zip(names, (none, 30 * MIB), strict=True)), memory__stat=f"{cache} 0")
    assert free_memory() == pytest.approx(unlimited, rel=0.2)
    write(
        root / "job", **dict(zip(names, (50 * MIB, 40 * MIB), strict=True)), memory__stat=f"other 7\n{cache} {5 * MIB}"
    )
    assert free_memory() == 15 * MIB


@pytest.mark.parametrize(
    ("membership", "folder", "files", "cores"),
    [
        ("0::/job\n", "job", {"cpu__max": "100000 100000"}, 1),
        ("0::/job\n", "", {"cpu__max": "50000 100000"}, 1),
        ("0::/job\n", "job", {"cpu__max": "max 100000"}, None),
        ("3:cpu,cpuacct:/job\n", "cpu/job", {"cpu__cfs_quota_us": 90_000, "cpu__cfs_period_us": 100_000}, 1),
        ("3:cpu,cpuacct:/job\n", "cpu", {"cpu__cfs_quota_us": -1, "cpu__cfs_period_us": 100_000}, None),
    ],
)
def test_a_limit_of_processor_time_limits_the_cores(membership, folder, files, cores, groups, tmp_path):
    unlimited = available_cores()
    (tmp_path / "membership").write_text(membership)
    write(groups / folder, **files)
    assert available_cores() == (cores or unlimited)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_named(number, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(BadInput, match=r"run has no file locks \(.*\): use another folder with --out"),
        locked(tmp_path / "run"),
    ):
        pass


def test_files_of_control_groups_that_cannot_be_parsed_are_ignored(groups, tmp_path):
    unlimited, cores = free_memory(), available_cores()
    (tmp_path / "membership").write_bytes(b"\n3:cpu\n0::/\xff\n")
    write(groups, memory__max=50 * MIB, memory__current=40 * MIB, cpu__max="5 0")
    assert (free_memory(), available_cores()) == (10 * MIB, cores)
    write(groups, memory__stat="inactive_file \n")
    assert free_memory() == 10 * MIB
    write(groups, memory__max="some", cpu__max="1")
    assert free_memory() == pytest.approx(unlimited, rel=0.2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("blank_pictures")
def test_a_run_lists_the_environments_in_which_it_was_trained_before(tmp_path, monkeypatch):
    for epochs in (1, 2, 3):
        fit(tiny(epochs), SPLITS, tmp_path, logger="none", resume=epochs > 1)
    first = read_run(tmp_path)
    assert first.earlier_environments == []
    elsewhere = {**first.environment, "processor": "another"}
    monkeypatch.setattr("torchcaps.run_folder.environment", lambda: elsewhere)
    for epochs in (4, 5):
        fit(tiny(epochs), SPLITS, tmp_path, logger="none", resume=True)
    assert read_run(tmp_path).earlier_environments == [first.environment]
    assert read_run(tmp_path).environment == elsewhere


def test_several_processes_need_a_script(tmp_path):
    script = "from torchcaps.environment import prepare_processes; prepare_processes(1); prepare_processes(2)"
    for words, given in ((["-c", script], None), (["-"], script)):
        done = subprocess.run(
            [sys.executable, *words], input=given, env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        assert "BadInput: devices must be 1 in an interactive session and in python -c; got 2" in done.stderr
    (tmp_path / "script.py").write_text(f"import os; os.chdir('/'); {script}")
    words = [sys.executable, "script.py"]
    assert subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, check=True).stderr == b""
