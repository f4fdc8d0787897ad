"""Progress where there is no terminal: lines with the time that is left, and tables as wide as their cells."""

from rich.table import Table

from gft.lab import display
from gft.lab.train import Progress


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def lines_of(moments, name="run"):
    """What `Lines` writes when it is shown each Progress at its second."""
    clock, written = Clock(), []
    with display.Lines(clock, written.append) as lines:
        for clock.now, progress in moments:
            lines.show(name, progress)
    return written


def test_a_line_every_ten_seconds_with_the_time_that_is_left():
    moments = [(step, Progress(step, 100, loss=1 / step if step % 5 == 0 else None)) for step in range(1, 41)]
    assert lines_of(moments) == [
        "run  5/100  loss 0.2000  elapsed 0:00:04  ETA 0:01:35",
        "run  15/100  loss 0.0667  elapsed 0:00:14  ETA 0:01:25",
        "run  25/100  loss 0.0400  elapsed 0:00:24  ETA 0:01:15",
        "run  35/100  loss 0.0286  elapsed 0:00:34  ETA 0:01:05",
    ]


def test_steps_of_an_earlier_sitting_do_not_count_as_fast():
    written = lines_of([(0, Progress(9000, 10000)), (50, Progress(9100, 10000, loss=1.5))])
    assert written == ["run  9100/10000  loss 1.5000  elapsed 0:00:50  ETA 0:07:30"]


def test_the_end_has_its_line_at_once():
    written = lines_of([(0, Progress(1, 3)), (1, Progress(2, 3, 0.5)), (2, Progress(3, 3, 0.25, 97.5, {"value": 97.5}))])
    assert written[-1] == "run  3/3  loss 0.2500  val 97.5  elapsed 0:00:02"


def test_many_runs_are_counted():
    clock, written = Clock(), []
    lines = display.Lines(clock, written.append)
    lines.add("all runs", 4, done=1)
    for clock.now in (60, 65, 180):
        lines.advance("all runs")
    assert written == ["all runs  2/4  elapsed 0:01:00  ETA 0:02:00", "all runs  4/4  elapsed 0:03:00"]


def test_a_table_without_a_terminal_is_not_cut(capsys):
    table = Table("case", "ours", title="a [title]")
    table.add_row("a case of many words, which say in detail what was measured, and on which machine it was", "[/b] 3.5")
    display.show(table)
    title, head, row = capsys.readouterr().out.splitlines()
    assert title.strip() == "a [title]"
    assert head.split() == ["case", "ours"]
    assert row.rstrip().endswith("on which machine it was  [/b] 3.5")
