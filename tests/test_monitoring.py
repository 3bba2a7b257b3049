"""The dashboard and the alarms ask for metrics that are there, and the documents explain them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.http.metrics import Metrics
from app.uhp.actions import ACTIONS
from tests.operations import table

ROOT = Path(__file__).parent.parent
DASHBOARD = json.loads((ROOT / "deploy/grafana/consignee.json").read_text())
RULES = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())

FUNCTIONS = {
    "rate",
    "increase",
    "sum",
    "max",
    "min",
    "histogram_quantile",
    "time",
    "predict_linear",
}
OPERATORS = {"by", "or"}
OF_PROMETHEUS = {"up"}
RECORDING = {"audit.record", "audit_command"}
LABELS_OF_PROMETHEUS = {"job", "instance", "le"}


def known() -> dict[str, set[str]]:
    """Every name that the exposition can have, with the labels of its series."""
    names: dict[str, set[str]] = {}
    metrics = Metrics()
    of_metric = {m._name: set(m._labelnames) for m in vars(metrics).values() if hasattr(m, "_name")}
    for family in metrics.registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        for suffix in suffixes.get(family.type, [""]):
            names[family.name + suffix] = of_metric[family.name]
    return names


KNOWN = known()


def words(expression: str) -> set[str]:
    """The metrics and functions of a query; labels, ranges and texts are left out."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)", "", expression)
    return set(re.findall(r"[a-z][a-z_]*[a-z]", bare))


def labels(expression: str) -> set[str]:
    """The labels that a query names."""
    matched = re.findall(r"[{,]\s*([a-z_]+)\s*(?:=|!)", expression)
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    return {*matched, *(name.strip() for group in grouped for name in group.split(","))}


def judge(expression: str) -> None:
    """Fail unless a query names only what there is."""
    for left, right in ("()", "[]", "{}"):
        assert expression.count(left) == expression.count(right), expression
    used = words(expression)
    asked = used - FUNCTIONS - OPERATORS
    assert asked, f"asks for nothing: {expression}"
    assert asked <= KNOWN.keys() | OF_PROMETHEUS, expression
    possible = set().union(*(KNOWN.get(name, set()) for name in asked))
    assert labels(expression) <= possible | LABELS_OF_PROMETHEUS, expression


def panels() -> list[dict[str, Any]]:
    found = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert found
    return found


def alarms() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_a_panel_asks_for_metrics_and_labels_that_are_there(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        judge(target["expr"])
        assert 'job=~"$job"' in target["expr"]
    legends = " ".join(target["legendFormat"] for target in panel["targets"])
    named = set(re.findall(r"\{\{(\w+)\}\}", legends))
    assert named <= set().union(*(labels(target["expr"]) for target in panel["targets"]))


def test_the_dashboard_shows_every_metric() -> None:
    asked = set().union(*(words(t["expr"]) for panel in panels() for t in panel["targets"]))
    shown = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked}
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in KNOWN} <= shown


def test_panels_have_places_and_numbers_of_their_own() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in DASHBOARD["panels"])


@pytest.mark.parametrize("alarm", alarms(), ids=lambda alarm: str(alarm["alert"]))
def test_an_alarm_asks_for_metrics_and_labels_that_are_there(alarm: dict[str, Any]) -> None:
    judge(alarm["expr"])
    assert set(alarm) <= {"alert", "expr", "for", "labels", "annotations"}
    assert alarm["labels"]["severity"] in ("page", "ticket")
    assert alarm["annotations"]["summary"]
    told = re.findall(r"\$labels\.(\w+)", alarm["annotations"]["summary"])
    assert set(told) <= labels(alarm["expr"]) | LABELS_OF_PROMETHEUS


def test_every_alarm_is_explained_and_no_other() -> None:
    names = [alarm["alert"] for alarm in alarms()]
    assert len(set(names)) == len(names)
    assert table("alarms") == set(names)


@pytest.mark.parametrize(
    "expression",
    [
        "rate(consignee_nothing_total[5m])",
        "rate(consignee_requests[5m])",
        'consignee_sessions{scope="a"}',
        "sum by (scope) (consignee_sessions)",
        "sum(consignee_sessions",
        "time()",
    ],
)
def test_a_query_that_is_wrong_is_seen(expression: str) -> None:
    with pytest.raises(AssertionError):
        judge(expression)


# --- fields of log lines -------------------------------------------------------------------------


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "app").rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def keys_of(value: ast.expr, module: ast.Module) -> set[str]:
    """The keys of the dictionary that `value` is, or that a name or a function here stands for."""
    if isinstance(value, ast.Dict):
        return {key.value for key in value.keys if isinstance(key, ast.Constant)}  # type: ignore[misc]
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        if value.func.id == "dict":
            return {str(keyword.arg) for keyword in value.keywords}
        function = next(
            node
            for node in ast.walk(module)
            if isinstance(node, ast.FunctionDef) and node.name == value.func.id
        )
        returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]
        return set().union(*(keys_of(one, module) for one in returned))
    if isinstance(value, ast.BinOp):
        return keys_of(value.left, module) | keys_of(value.right, module)
    assert isinstance(value, ast.Name), ast.dump(value)
    assigned = [
        node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == value.id
    ]
    assert assigned, f"nobody knows what {value.id} holds"
    return set().union(*(keys_of(one, module) for one in assigned))


def logged_fields() -> set[str]:
    """What is given as `extra`, and what the line of a request has; audit records apart."""
    found = {"time", "level", "logger", "message", "exception"}
    for _, module in sources():
        for node in ast.walk(module):
            if not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func) == "RequestLine":
                found |= {str(keyword.arg) for keyword in node.keywords}
            if not isinstance(node.func, ast.Attribute):
                continue
            extras = [keyword.value for keyword in node.keywords if keyword.arg == "extra"]
            if node.func.attr in ("debug", "info", "warning", "error", "exception", "log"):
                found |= set().union(*(keys_of(extra, module) for extra in extras), set())
    return found


def test_every_field_of_a_log_line_is_explained_and_no_other() -> None:
    assert table("log fields") == logged_fields()


def actions() -> Iterator[str]:
    """What the code calls actions: in the table of routes, of an endpoint, and in records."""
    for by_method in ACTIONS.values():
        yield from by_method.values()
    for _, module in sources():
        for node in ast.walk(module):
            if isinstance(node, ast.Assign) and "action" in ast.unparse(node.targets[0]):
                yield from re.findall(r"'([a-z]+\.[a-z]+)'", ast.unparse(node.value))
            if isinstance(node, ast.Call) and ast.unparse(node.func) in RECORDING:
                yield from re.findall(r"^'([a-z]+\.[a-z]+)'", ast.unparse(node.args[0]))


def test_every_action_is_explained_and_no_other() -> None:
    assert table("actions") == set(actions())


def test_every_metric_is_explained_and_no_other() -> None:
    assert table("metrics") == {re.sub(r"_(bucket|sum|count)$", "", name) for name in KNOWN}
