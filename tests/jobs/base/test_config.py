import dataclasses
import re

import pytest

from jobs.base.config import Config, commented, load, taken_profile
from jobs.base.profiles import LARGEST, PROFILES, profile_of
from jobs.base.settings import build, flatten, to_yaml


def test_defaults_then_file_then_overrides(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("train: {steps: 10, lr: 1e-3}\nserve:\n")
    cfg = load(file, ["train.steps=20", "train.steps=30"])
    assert (cfg.train.steps, cfg.train.lr, cfg.train.batch_size) == (30, 1e-3, 4)
    assert cfg.serve == load().serve


def test_defaults_follow_the_size_of_the_target(tmp_path):
    def sized(size, *words):
        with open(tmp_path / "model-00001-of-00001.safetensors", "wb") as file:
            file.truncate(size)  # sparse: no byte is written
        cfg = load(None, [f"target.path={tmp_path}", *words])
        return taken_profile(cfg), cfg.drafter.layers, cfg.train.optimizer, cfg.train.shard

    assert sized(270 << 20) == ("small", 2, "muon", "ddp")
    assert sized(16 << 30) == ("8b", 5, "adamw", "ddp")
    assert sized(140 << 30) == ("70b", 5, "adamw", "fsdp")
    assert sized(16 << 30, "profile=small", "drafter.layers=3") == ("small", 3, "muon", "ddp")
    assert load(None, [f"work={tmp_path}/none"]).drafter.layers == 2, "the built-in target is small"
    (tmp_path / "my.yaml").write_text("profile: 8b\ntrain: {lr: 1e-3}\n")
    cfg = load(tmp_path / "my.yaml", ["train.anchors=9"])
    assert (cfg.train.steps, cfg.train.lr, cfg.train.anchors) == (10_000, 1e-3, 9)


def test_weights_that_lie_there_twice_or_half_do_not_count(tmp_path):
    names = ("model-00001.safetensors", ".model-00002.safetensors", "consolidated.safetensors")
    for name in names:
        with open(tmp_path / name, "wb") as file:
            file.truncate(3 << 30)
    assert profile_of(tmp_path) == "small"
    (tmp_path / names[0]).unlink()
    with open(tmp_path / names[2], "wb") as file:
        file.truncate(9 << 30)
    assert profile_of(tmp_path) == "8b"


def test_a_printed_file_follows_the_size_of_another_target(tmp_path):
    """It once froze the profile of the day it was printed."""
    file = tmp_path / "my.yaml"
    file.write_text(commented(load(None, ["train.anchors=9", "train.seed=3"])))
    assert (load(file).train.steps, load(file).train.anchors, load(file).train.seed) == (150, 9, 3)
    larger = load(file, ["profile=8b"])
    assert (larger.train.steps, larger.train.optimizer, larger.train.anchors) == (
        10_000,
        "adamw",
        9,
    )


def test_the_folder_of_the_command_may_have_any_name(tmp_path, monkeypatch):
    """Only the work folder may not: its default lies below the folder of the command."""
    (tmp_path / "a%2Fb").mkdir()
    monkeypatch.chdir(tmp_path / "a%2Fb")
    assert "# steps: 150" in commented(load(None, [f"work={tmp_path}"]))


def test_profiles_name_settings_and_say_something_else_than_the_default():
    default = flatten(Config, dataclasses.asdict(Config()))
    for values in PROFILES.values():
        build(Config, values)
        assert all(default[name] != value for name, value in values.items())
    assert {*LARGEST, "70b"} == PROFILES.keys()


def test_the_printed_schema_loads_back_to_the_same(tmp_path):
    cfg = load(
        None, ["drafter.taps=1,8,14", "ingest.logs=a,b", 'serve.args=["--x", "{\\"a\\": 1}"]']
    )
    file = tmp_path / "all.yaml"
    file.write_text(to_yaml(cfg))
    assert load(file) == cfg
    assert cfg.serve.args == ["--x", '{"a": 1}']


def test_every_setting_has_a_meaning():
    for section in dataclasses.fields(Config):
        settings = getattr(Config(), section.name)
        if dataclasses.is_dataclass(settings):
            assert type(settings).__doc__
            assert all(item.metadata["help"] for item in dataclasses.fields(settings))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.step=1"], "unknown setting 'train.step': did you mean train.steps"),
        (["steps=1"], "unknown setting 'steps': did you mean train.steps?"),
        (["trian.lr=1"], "did you mean train.lr"),
        (["zzzzzz=1"], "`flywheel config` lists them all"),
        (["train=1"], "'train' is a section: set one of train.base, train.part"),
        (["train.steps"], "settings are given as name=value"),
        (["train.steps=many"], "train.steps = 'many': expected integer >= 0"),
        (["train.steps=1.5"], "train.steps = 1.5: expected integer >= 0"),
        (["train.steps=true"], "train.steps = True: expected integer >= 0"),
        (["train.lr=fast"], "train.lr = 'fast': expected number >= 0"),
        (["train.lr=" + "9" * 400], "expected number >= 0"),
        (["work=runs/feature%2Fx"], "where % has a meaning: choose a folder without it"),
        (["work=runs/team?a"], "where ? has a meaning"),
        (["work=s3://"], "work = 's3://': it names no bucket: write s3://BUCKET/FOLDER"),
        (["work=gs:///run"], "work = 'gs:///run': it names no bucket"),
        (["work=s3:/b/run"], "work = 's3:/b/run': write s3://b/run for a place in a bucket"),
        (["work=http://x/run"], "a URL that begins with s3://, gs://, az://"),
        (["ingest.logs=s3:/b/logs"], "ingest.logs = 's3:/b/logs': write s3://b/logs"),
        (["promote.drafter=s3a://b/d"], "'s3a://b/d': expected a local folder, or a URL that"),
        (["train.warmup=2"], "train.warmup = 2.0: a share of the steps, at most 1"),
        (["train.lr=nan"], "train.lr = nan: expected number >= 0"),
        (["serve.capture=~nobody-of-that-name/x"], "capture = '~nobody-of-that-name/x': "),
        (["serve.eager=1"], "serve.eager = 1: expected true or false"),
        (["train.batch_size=0"], "train.batch_size = 0: expected integer >= 1"),
        (["train.optimizer=mun"], "expected muon | adamw; did you mean 'muon'?"),
        (["drafter.taps=1,x"], "drafter.taps = [1, 'x']: expected list of integers"),
        (["drafter.taps=8,1"], "drafter.taps = [8, 1]: layer ids must be strictly increasing"),
        (["ingest.val_percent=50", "ingest.test_percent=50"], "nothing is left to train on"),
        (["train.ema=1"], "a decay is below 1"),
        (["train.gamma=7"], "train.gamma = 7.0 needs train.weights=decay"),
        (["train.lora_rank=8"], "set train.base"),
        (["train.lora_rank=8", "train.base=x"], "set train.optimizer=adamw and a train.lr"),
        (["methods.names=ngrm"], "methods.names = ['ngrm']: expected some of ngram, suffix, "),
        (["methods.k=0"], "methods.k = [0]: expected draft tokens per round"),
        (["methods.ngram_min=5"], "methods.ngram_min = 5 is above methods.ngram_max = 4"),
    ],
)
def test_refused_override_is_named_with_what_to_write(overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(None, overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trian: {steps: 1}", "unknown setting 'trian': did you mean train"),
        ("train: {step: 1}", "unknown setting 'train.step': did you mean train.steps"),
        ("train: 5", "train = 5: expected a section"),
        ("- train", "expected sections such as 'train:', found a list"),
        ("train:\n  steps: [1\n  lr: x\n", "my.yaml is not valid YAML: line 3: expected"),
        ("train: {steps: '5'}", "train.steps = '5': expected integer"),
        ("mlflow: {experiment: 5}", "mlflow.experiment = 5: expected text"),
    ],
)
def test_refused_file_is_named_with_what_to_write(tmp_path, text, message):
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        load(file)


def test_missing_file_is_named_with_how_to_make_one(tmp_path):
    with pytest.raises(ValueError, match=r"none.yaml: no such file; `flywheel config"):
        load(tmp_path / "none.yaml")


def test_text_settings_take_the_override_as_it_is():
    assert load(None, ["mlflow.experiment=2024"]).mlflow.experiment == "2024"
    assert load(None, ["mlflow.uri=http://x?a=b"]).mlflow_uri == "http://x?a=b"


def test_paths_are_made_absolute_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = load(None, ["work=here", "ingest.logs=a/*.jsonl,s3://bucket/b"])
    monkeypatch.chdir("/")
    assert cfg.path("traffic", "x") == tmp_path / "here" / "traffic" / "x"
    assert cfg.ingest.logs == [str(tmp_path / "a/*.jsonl"), "s3://bucket/b"]
    assert cfg.train.base == ""  # empty stays empty: it means "none"
    assert cfg.target_path == tmp_path / "here" / "target"
    assert cfg.mlflow_uri == f"sqlite:///{tmp_path}/here/mlflow.db"


@pytest.mark.parametrize("name", ["methods.eagle3", "serve.capture", "scratch"])
def test_what_must_be_on_a_local_disk_is_no_url(name):
    with pytest.raises(ValueError, match=rf"{name} = 's3://b/x': it must be .* on a local disk"):
        load(None, [f"{name}=s3://b/x"])


def test_what_may_be_in_a_bucket_keeps_its_url():
    cfg = load(None, ["work=s3://b/x", "promote.drafter=s3://b/d", "methods.dflash=s3://b/d"])
    assert (cfg.work, cfg.promote.drafter) == ("s3://b/x", "s3://b/d")
    assert cfg.methods.dflash == "s3://b/d"
    assert str(cfg.place("drafters")) == "s3://b/x/drafters"


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().train.steps = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_training_nothing_needs_a_base_and_seeds_fit():
    with pytest.raises(ValueError, match=r"train.steps = 0 .*set train.base"):
        load(None, ["train.steps=0"])
    with pytest.raises(ValueError, match="fit in 64 bits"):
        load(None, [f"train.seed={1 << 70}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train:\n  steps: 4\nserve: {port: 1}\ntrain:\n  mix: 0.5\n",
            "my.yaml: 'train' stands twice, in lines 1 and 4",
        ),
        (
            "serve:\n  args: [a]\n  port: 1\n  args: [b]\n",
            "my.yaml: 'args' stands twice, in lines 2 and 4",
        ),
        ("serve:\n  args: [{a: 1,\n   a: 2}]\n", "'a' stands twice, in lines 2 and 3"),
        ("x: &x {steps: 1}\ntrain:\n  <<: *x\n  <<: *x\n", "'<<' stands twice, in lines 3 and 4"),
        (
            "train:\n\tsteps: 4\n",
            "line 2: found character '\\t' that cannot start any token; ",
        ),
        ("train:\nsteps: 4\n", "unknown setting 'steps': did you mean train.steps?"),
        ("train: {steps: 4}\n---\ntrain: {lr: 1}\n", "line 2: but found another document"),
        ("mlflow: {experiment: no}", "mlflow.experiment = False: expected text; a text such as no"),
        ("mlflow: {experiment: 2024-01-31}", "expected text; a text such as no, on, 2024"),
        ("mlflow: {experiment: }", 'expected text; nothing is written "" or []'),
        ("ingest: {logs: [2024, a]}", "ingest.logs = [2024, 'a']: expected list of texts; a text"),
        ("serve: {port: 010}", "my.yaml: line 1: YAML reads 010 as another number"),
        ("train: {steps: 1:30}", "my.yaml: line 1: YAML reads 1:30 as another number"),
        ("work: a\0b", "unacceptable character"),
        ("[" * 3000, "my.yaml is not valid YAML"),
        ("on: 5", "unknown setting 'True'"),
        ('work: "\\ud800"', "not UTF-8"),
    ],
)
def test_what_yaml_would_read_otherwise_than_it_is_written_is_refused(tmp_path, text, message):
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        load(file)


def test_anchors_and_merges_are_read_and_may_be_overridden(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(
        "train: &same {seed: 7, steps: 5}\ndemo:\n  <<: {seed: 1, tickets: 3}\n  seed: 2\n"
    )
    cfg = load(file)
    assert (cfg.train.seed, cfg.demo.seed, cfg.demo.tickets) == (7, 2, 3)


def test_an_override_says_which_setting_it_cannot_read():
    with pytest.raises(ValueError, match=r"'serve.port=010': line 1: YAML reads 010"):
        load(None, ["serve.port=010"])


def test_a_name_that_is_no_text_is_refused_before_files_are_written():
    with pytest.raises(ValueError, match=r"work = '/tmp/\\udcff': not UTF-8"):
        load(None, ["work=/tmp/\udcff"])


def test_the_scratch_folder_of_a_bucket_is_where_the_command_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = load(None, ["work=s3://bucket/mine"])
    monkeypatch.chdir("/")
    assert cfg.path("x") == tmp_path / "runs/mine/x", "a worker of Ray has another folder"
