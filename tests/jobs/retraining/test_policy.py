"""The policy file: its defaults are whole, and a mistake is named with its fix."""

import pytest

from jobs.retraining.policy import DEFAULT, read_policy


def test_a_file_replaces_what_it_names(tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text("tokens: {min: 5000, domains: [tickets=200, '(all)=0']}\nschedule: {hours: 6}")
    found, default = read_policy(str(file)), read_policy("")
    assert (found.schedule.hours, found.drift) == (6.0, default.drift)
    assert [found.tokens.limit(name) for name in ("tickets", "(all)", "x")] == [200, 0, 5000]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("schedul: {hours: 1}", "unknown setting 'schedul': did you mean schedule"),
        ("tokens: {minimum: 1}", "unknown setting 'tokens.minimum'"),
        ("schedule: {hours: often}", "schedule.hours = 'often': expected number >= 0"),
        ("schedule: {hours: 1:30}", "write numbers without a zero before them and without colons"),
        ("tokens: {domains: [tickets]}", "'tickets' is not DOMAIN=TOKENS"),
        ("drift: {fall: 0.02}", "expected recovered < fall < 1"),
        ("drift: {long: 100}", "drift.long = 100 and drift.short = 400: expected long >= short"),
        ("drift: {short: 3}", "drift.short = 3: expected integer >= 40"),
        ("drift: {error: 0.7}", "expected a chance such as 0.001"),
        ("target: {changed: 'yes'}", "target.changed = 'yes': expected true or false"),
        ("schedule: 24", "schedule = 24: expected a section with settings below it"),
        ("schedule: {hours: 1}\nschedule: {hours: 2}", "'schedule' stands twice, in lines 1 and 2"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, told):
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"policy\.yaml") as error:
        read_policy(str(file))
    assert told in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=f"no such file; copy {DEFAULT} there"):
        read_policy(str(tmp_path / "none.yaml"))
