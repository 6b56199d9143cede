"""The dashboard as Grafana reads it: classic JSON, provisioned from a file. Schema version 39 is Grafana 10 and up."""

from typing import Any

from tools.dashboard.panel import Panel, Query, Row, Variable

UID = "foreword"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_WIDTH, _HEIGHT = 8, 8


def dashboard(rows: tuple[Row, ...], variables: tuple[Variable, ...]) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": top},
                "panels": [],
            }
        )
        top += 1
        for number, panel in enumerate(row.panels):
            line, column = divmod(number, _COLUMNS // _WIDTH)
            place = {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": top + line * _HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
        top += -(-len(row.panels) // (_COLUMNS // _WIDTH)) * _HEIGHT
    return {
        "uid": UID,
        "title": "Foreword",
        "description": "Made by `python -m tools.dashboard`; changes belong into tools/dashboard/panels.py.",
        "tags": ["foreword"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource_variable(), *(_variable(variable) for variable in variables)]},
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    makers = {"timeseries": _timeseries, "heatmap": _heatmap, "state": _state}
    return {
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _DATASOURCE,
        "targets": [_target(panel, query, chr(ord("A") + number)) for number, query in enumerate(panel.queries)],
        **makers[panel.kind](panel),
    }


def _target(panel: Panel, query: Query, ref_id: str) -> dict[str, Any]:
    return {
        "refId": ref_id,
        "datasource": _DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        "range": True,
    }


def _timeseries(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {
        "drawStyle": "line",
        "lineWidth": 2,
        "fillOpacity": 40 if panel.stacked else 8,
        "showPoints": "auto",
        "spanNulls": 60_000,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "scaleDistribution": {"type": "log", "log": 10} if panel.log else {"type": "linear"},
    }
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": custom}
    if not panel.log:
        defaults["min"] = 0
    if panel.limit is not None:
        custom["thresholdsStyle"] = {"mode": "line"}
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.limit}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return {
        "type": "timeseries",
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _heatmap(panel: Panel) -> dict[str, Any]:
    return {
        "type": "heatmap",
        "fieldConfig": {"defaults": {}, "overrides": []},
        "options": {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5, "fill": "dark-orange"},
            "yAxis": {"axisPlacement": "left", "unit": panel.unit, "reverse": False},
            "tooltip": {"show": True, "yHistogram": True},
            "legend": {"show": True},
        },
    }


def _state(panel: Panel) -> dict[str, Any]:
    return {
        "type": "state-timeline",
        "fieldConfig": {
            "defaults": {
                "custom": {"fillOpacity": 70, "lineWidth": 0},
                "mappings": [
                    {
                        "type": "value",
                        "options": {
                            "0": {"text": "left", "color": "orange", "index": 0},
                            "1": {"text": "taken", "color": "green", "index": 1},
                        },
                    }
                ],
            },
            "overrides": [],
        },
        "options": {
            "showValue": "never",
            "rowHeight": 0.8,
            "mergeValues": True,
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "single", "sort": "none"},
        },
    }


def _datasource_variable() -> dict[str, Any]:
    return {"type": "datasource", "name": "datasource", "label": "data source", "query": "prometheus"}


def _variable(variable: Variable) -> dict[str, Any]:
    options = [
        {"text": choice, "value": choice, "selected": not number} for number, choice in enumerate(variable.choices)
    ]
    return {
        "type": "custom",
        "name": variable.name,
        "label": variable.label,
        "description": variable.meaning,
        "query": ",".join(variable.choices),
        "current": options[0],
        "options": options,
        "multi": False,
        "includeAll": False,
    }
