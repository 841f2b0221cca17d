"""A run keeps its place: checkpoints and draws come back, whenever it was killed, and only to the same fit."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from caveat import Categorical, CorruptFile, Network
from caveat.engine import run as run_module
from caveat.engine.distributed import Ranks
from caveat.engine.run import Info, Run

IDENTITY = {"method": {"type": "MAP", "fields": {"sizes": (1, 2)}}, "network": "abc", "seed": 3}


def carry(value: float) -> dict:
    return {"now": {"w": torch.full((3,), value), "count": torch.tensor(7)}, "rng": {}}


def begin(folder: Path | None, **options) -> Run:
    return Run(3, folder=folder, identity=IDENTITY, **options)


def test_checkpoint_comes_back_to_the_same_fit(tmp_path: Path) -> None:
    first = begin(tmp_path / "fit.partial")
    assert first.resume() is None
    first.gradient_evaluations, first.flops = 2.5, 1e9
    for step in (1, 2, 3):
        first.checkpoint(carry(step), {"epoch": step})
    again = begin(tmp_path / "fit.partial")
    resumed = again.resume()
    assert resumed is not None
    state, note = resumed
    assert note == {"epoch": 3}
    assert list(state) == ["now", "rng"]
    assert torch.equal(state["now"]["w"], torch.full((3,), 3.0))
    assert state["now"]["count"].dtype == torch.int64
    assert (again.gradient_evaluations, again.flops) == (2.5, 1e9)
    files = sorted(path.name for path in (tmp_path / "fit.partial").iterdir())
    assert files == ["checkpoint-0.safetensors", "checkpoint.json", "run.json"]
    again.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", IDENTITY)
def test_another_fit_is_refused(tmp_path: Path, key: str) -> None:
    begin(tmp_path).checkpoint(carry(1), {})
    with pytest.raises(ValueError, match=f"unfinished fit with another {key}: delete it, or choose another folder"):
        Run(3, folder=tmp_path, identity=IDENTITY | {key: "other"})
    missing = {name: value for name, value in IDENTITY.items() if name != key}
    with pytest.raises(ValueError, match=f"another {key}"):
        Run(3, folder=tmp_path, identity=missing)
    assert begin(tmp_path).resume() is not None


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    alone = begin(None)
    alone.checkpoint(carry(1), {})
    alone.append("draw", carry(1))
    assert alone.resume() is None
    assert alone.appended("draw") is None
    assert not alone.checkpoint_due()
    assert alone.child("part").folder is None
    alone.discard()


def test_kill_between_tensors_and_json_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch) -> None:
    first = begin(tmp_path)
    first.checkpoint(carry(1), {"epoch": 1})

    def killed(path: Path, content: dict) -> None:
        raise KeyboardInterrupt

    for _ in range(2):  # twice, since the second attempt finds what the first left
        with monkeypatch.context() as patched:
            patched.setattr(run_module, "write_json", killed)
            with pytest.raises(KeyboardInterrupt):
                first.checkpoint(carry(2), {"epoch": 2})
        state, note = begin(tmp_path).resume() or ({}, {})
        assert note == {"epoch": 1}
        assert torch.equal(state["now"]["w"], torch.full((3,), 1.0))
    first.checkpoint(carry(3), {"epoch": 3})
    state, note = begin(tmp_path).resume() or ({}, {})
    assert note == {"epoch": 3}
    assert torch.equal(state["now"]["w"], torch.full((3,), 3.0))
    assert len(list(tmp_path.glob("checkpoint-*.safetensors"))) == 1


def test_kill_before_the_earlier_tensors_are_removed(tmp_path: Path, monkeypatch) -> None:
    first = begin(tmp_path)
    first.checkpoint(carry(1), {"epoch": 1})

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("checkpoint-"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            first.checkpoint(carry(2), {"epoch": 2})
    assert (begin(tmp_path).resume() or ({}, {}))[1] == {"epoch": 2}
    begin(tmp_path).checkpoint(carry(3), {"epoch": 3})
    assert (begin(tmp_path).resume() or ({}, {}))[1] == {"epoch": 3}
    assert len(list(tmp_path.glob("checkpoint-*.safetensors"))) == 1


def test_damaged_place_is_refused(tmp_path: Path) -> None:
    begin(tmp_path).checkpoint(carry(1), {})
    tensors = next(tmp_path.glob("checkpoint-*"))
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1])
    with pytest.raises(CorruptFile, match="cut or was changed"):
        begin(tmp_path).resume()
    tensors.unlink()
    with pytest.raises(CorruptFile, match="is missing"):
        begin(tmp_path).resume()
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(CorruptFile, match=r"run\.json is not a whole file"):
        begin(tmp_path)


def test_appended_draws_are_kept_apart(tmp_path: Path) -> None:
    first = begin(tmp_path)
    names = ["draw", "draw-1", "draw-10", "draw-0", "member"]
    for value, name in enumerate(names):
        first.append(name, {"draw": {"w": torch.tensor([float(value)])}}, {"name": name})
    first.append("draw", {"draw": {"w": torch.tensor([9.0])}}, {"name": "draw"})  # replaces its own only
    again = begin(tmp_path)
    for value, name in zip([9.0, 1.0, 2.0, 3.0, 4.0], names, strict=True):
        state, note = again.appended(name) or ({}, {})
        assert note == {"name": name}
        assert float(state["draw"]["w"]) == value
    assert again.appended("draw-2") is None
    assert again.resume() is None


def test_costs_never_fall_when_earlier_draws_are_read(tmp_path: Path) -> None:
    first = begin(tmp_path)
    for evaluations in (1.0, 2.0):
        first.gradient_evaluations = evaluations
        first.append(f"draw-{evaluations:g}", carry(0))
    again = begin(tmp_path)
    again.appended("draw-2")
    again.appended("draw-1")
    assert again.gradient_evaluations == 2.0


def test_children_have_seeds_of_their_own_that_do_not_depend_on_order(tmp_path: Path) -> None:
    parent, other = begin(None), begin(None)
    torch.randn(10, generator=other.rng)
    other.child("b")
    seeds = {name: parent.child(name).seed for name in ("a", "b", "member-1", "member-11")}
    assert other.child("a").seed == seeds["a"]
    assert parent.child("a").child("b").seed not in seeds.values()
    assert len({*seeds.values(), parent.seed, Run(4).child("a").seed}) == 6
    assert torch.equal(parent.child("a").rng.get_state(), other.child("a").rng.get_state())
    assert torch.equal(begin(None).rng.get_state(), torch.Generator().manual_seed(3).get_state())


def test_children_keep_their_place_in_the_parents_folder(tmp_path: Path) -> None:
    parent = begin(tmp_path, label="DeepEnsemble", seconds_between_checkpoints=5.0)
    part = parent.child("member-1")
    part.checkpoint(carry(1), {"epoch": 1})
    assert part.folder == tmp_path / "member-1"
    assert part.label == "DeepEnsemble member-1"
    assert part.seconds_between_checkpoints == 5.0
    assert parent.resume() is None
    assert begin(tmp_path).child("member-1").resume() is not None
    assert begin(tmp_path).child("member-2").resume() is None
    (tmp_path / "member-2" / "run.json").replace(tmp_path / "member-1" / "run.json")
    with pytest.raises(ValueError, match="another part"):
        begin(tmp_path).child("member-1")


def test_absorb_adds_costs_and_warns_once() -> None:
    parent = Run(warnings=["a"])
    for warning in ("a", "b"):
        part = parent.child(warning)
        part.gradient_evaluations, part.flops, part.warnings = 1.5, 2.0, [warning, "c"]
        parent.absorb(part)
    assert (parent.gradient_evaluations, parent.flops, parent.warnings) == (3.0, 4.0, ["a", "c", "b"])


def test_the_time_of_parts_that_a_killed_run_finished_counts(tmp_path: Path) -> None:
    first = begin(tmp_path)
    for name, seconds in (("one", 100.0), ("two", 20.0)):
        part = first.child(name)
        part._started_at -= seconds
        part.append("done", carry(1))
    second = begin(tmp_path)
    for name in ("one", "two", "three"):
        part = second.child(name)
        part.appended("done")
        second.absorb(part)
    assert 120 <= second.seconds() < 125
    part = second.child("four")
    part._started_at -= 30
    part.append("done", carry(1))
    part.appended("done")  # its own: that time goes by on the parent's clock as well
    second.absorb(part)
    assert 120 <= second.seconds() < 125


def test_checkpoint_is_due_after_a_while(tmp_path: Path) -> None:
    now, never = (begin(tmp_path, seconds_between_checkpoints=s) for s in (0.0, 1e9))
    assert now.checkpoint_due()
    assert not never.checkpoint_due()


def test_only_the_first_rank_writes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Ranks, "wait", lambda self: None)
    second = begin(tmp_path / "fit", ranks=Ranks(1, 2))
    second.checkpoint(carry(1), {})
    assert list(tmp_path.iterdir()) == []
    assert begin(tmp_path / "fit", ranks=Ranks(0, 2)).folder == tmp_path / "fit"
    assert second.child("member", alone=True).ranks == Ranks()
    assert second.child("sums").ranks == Ranks(1, 2)
    assert second.bar(3, "batch").disable


def test_info_says_how_each_layer_is_treated() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    network = Network(module, Categorical(), parameters=["1.*", "2.weight"])
    run = Run(warnings=["beware"])
    info = run.info(network, "Gaussian", {"rank": 2})
    assert [(c["layer"], c["kind"], c["parameters"], c["treatment"], c["why"]) for c in info.coverage] == [
        ("0", "Linear", 9, "fixed", "frozen (requires_grad=False)"),
        ("1", "BatchNorm1d", 6, "Gaussian", ""),
        ("2", "Linear", 8, "Gaussian, in part", "left out by parameters="),
    ]
    assert (info.diagnostics, info.warnings) == ({"rank": 2}, ["beware"])
    assert Run().info(Network(nn.Linear(1, 1), Categorical()), "MAP").coverage[0]["layer"] == "(module)"
    assert Info(**json.loads(json.dumps(vars(info)))) == info


def test_a_fit_begun_when_method_and_knobs_were_one_entry_goes_on(tmp_path: Path) -> None:
    Run(3, folder=tmp_path, identity={"method": "the knobs", "seed": 3}, progress=False).checkpoint(carry(1), {})
    again = Run(3, folder=tmp_path, identity={"method": "MAP", "knobs": "the knobs", "seed": 3}, progress=False)
    assert again.resume() is not None
    with pytest.raises(ValueError, match="other knobs of the method"):
        Run(3, folder=tmp_path, identity={"method": "MAP", "knobs": "others", "seed": 3}, progress=False)
