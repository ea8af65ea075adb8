"""What all boards share: variables, links, annotations, and panels in one look."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as mc
from grafana_foundation_sdk.models import dashboard as md
from grafana_foundation_sdk.models import heatmap as mh
from grafana_foundation_sdk.models import prometheus as mp

from grafana.promql import vllm
from kvlens.telemetry import semconv as s

SOURCE: Final = md.DataSourceRef(type_val="prometheus", uid="${datasource}")
ENGINE: Final = {s.LABEL_MODEL: "$model", "instance": "$instance", s.LABEL_ENGINE: "$engine"}
GROUP: Final = {**ENGINE, s.LABEL_GROUP: "$group"}
HEIGHT: Final = 8
RATE: Final = "$__rate_interval"
UIDS: Final = {"fleet": "kvlens-fleet", "engine": "kvlens-engine", "stock": "kvlens-stock"}


@dataclass(frozen=True)
class Query:
    """One expression of a panel and how its series are called."""

    expr: str
    legend: str = "__auto"
    exemplars: bool = False


@dataclass(frozen=True)
class Panel:
    """One panel; ``width`` is in 24ths of the board."""

    title: str
    description: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    stacked: bool = False
    red_from: float | None = None
    """Value from which a stat turns red."""
    maximum: float | None = None
    columns: dict[str, str] = field(default_factory=dict)
    """Labels that a table shows, and their titles."""
    links: dict[str, str] = field(default_factory=dict)
    """Titles and addresses that a series leads to."""


def _target(query: Query, ref: str, kind: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref).expr(query.expr).legend_format(query.legend)
    target.exemplar(query.exemplars)
    if kind in ("table", "stat"):
        target.instant()
    else:
        target.range()
    if kind == "heatmap":
        target.format(mp.PromQueryFormat.HEATMAP)
    elif kind == "table":
        target.format(mp.PromQueryFormat.TABLE)
    return target


def _builder(panel: Panel) -> Any:
    if panel.kind == "stat":
        steps = [md.Threshold(value=None, color="green")]
        if panel.red_from is not None:
            steps.append(md.Threshold(value=panel.red_from, color="red"))
        return (
            stat.Panel()
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            .color_mode(mc.BigValueColorMode.VALUE)
            .graph_mode(mc.BigValueGraphMode.NONE)
            .thresholds(
                dashboard.ThresholdsConfig().mode(md.ThresholdsMode.ABSOLUTE).steps(steps)
            )
        )  # fmt: skip
    if panel.kind == "heatmap":
        return (
            heatmap.Panel()
            .calculate(False)
            .y_axis(heatmap.YAxisConfig().unit(panel.unit))
            .color(heatmap.HeatmapColorOptions().mode(mh.HeatmapColorMode.SCHEME).scheme("Oranges"))
            .exemplars_color("rgba(31, 96, 196, 0.9)")
            .show_legend()
        )
    if panel.kind == "table":
        hidden = {"Time": True, "Value": True, "__name__": True, "job": True}
        organize = md.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": hidden,
                "renameByName": panel.columns,
                "indexByName": {name: place for place, name in enumerate(panel.columns)},
            },
        )
        plain = table.Panel().align(mc.FieldTextAlignment.AUTO).inspect(False)
        return plain.with_transformation(organize)
    drawn = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(20 if panel.stacked else 6)
        .show_points(mc.VisibilityMode.NEVER)
        .tooltip(common.VizTooltipOptions().mode(mc.TooltipDisplayMode.MULTI)
                 .sort(mc.SortOrder.DESCENDING))
        .legend(common.VizLegendOptions().show_legend(True).display_mode(mc.LegendDisplayMode.LIST)
                .placement(mc.LegendPlacement.BOTTOM).calcs([]))
    )  # fmt: skip
    if panel.stacked:
        drawn.stacking(common.StackingConfig().mode(mc.StackingMode.NORMAL).group("A"))
    return drawn


def _build(panel: Panel, number: int) -> Any:
    built = _builder(panel).id(number).title(panel.title).description(panel.description)
    built.datasource(SOURCE).height(HEIGHT if panel.kind != "stat" else 4).span(panel.width)
    if panel.kind != "heatmap":
        built.unit(panel.unit).min(0.0)
    if panel.maximum is not None:
        built.max(panel.maximum)
    if panel.links:
        built.data_links([_link(*item) for item in panel.links.items()])
    for index, query in enumerate(panel.queries):
        built.with_target(_target(query, chr(ord("A") + index), panel.kind))
    return built


def _link(title: str, url: str) -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink(title).type(md.DashboardLinkType.LINK).url(url).target_blank(True)
    )


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(md.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(md.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


SEARCH: Final = "${kvlens_url}/requests?since=${__from:date:iso}&until=${__to:date:iso}"
"""The dashboard's request search over the board's time range."""


def board(
    key: str, title: str, description: str, rows: dict[str, list[Panel]], *, of: str,
    grouped: bool = False,
) -> md.Dashboard:  # fmt: skip
    """A board of ``rows``; variables take their values from the sample ``of``."""
    built = (
        dashboard.Dashboard(title)
        .uid(UIDS[key])
        .description(description)
        .tags(["kvlens", "vllm"])
        .readonly()
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .tooltip(md.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus")
                       .type("prometheus"))
        .with_variable(_variable("model", "Model", f"label_values({of}, {s.LABEL_MODEL})"))
        .with_variable(_variable(
            "instance", "Instance", f'label_values({of}{{{s.LABEL_MODEL}=~"$model"}}, instance)'))
        .with_variable(_variable(
            "engine", "Engine", f'label_values({of}{{instance=~"$instance"}}, {s.LABEL_ENGINE})'))
    )  # fmt: skip
    if grouped:
        groups = f'label_values({s.GROUP_INFO.name}{{instance=~"$instance"}}, {s.LABEL_GROUP})'
        built.with_variable(_variable("group", "Group", groups))
    built.with_variable(
        dashboard.TextBoxVariable("kvlens_url")
        .label("kvlens")
        .default_value("http://127.0.0.1:8790")
    )
    built.link(_link("Requests in kvlens", SEARCH))
    built.link(
        dashboard.DashboardLink("kvlens boards").type(md.DashboardLinkType.DASHBOARDS)
        .tags(["kvlens"]).as_dropdown(True).include_vars(True).keep_time(True)
    )  # fmt: skip
    for name, colour, expr in ANNOTATIONS:
        built.annotation(
            dashboard.AnnotationQuery()
            .name(name).datasource(SOURCE).enable(True).icon_color(colour).expr(expr)
            .filter(dashboard.AnnotationPanelFilter().exclude(False).ids([]))
        )  # fmt: skip
    number = 0
    for row, panels in rows.items():
        number += 1
        built.with_row(dashboard.Row(row).id(number))
        for panel in panels:
            number += 1
            built.with_panel(_build(panel, number))
    return built.build()


ANNOTATIONS: Final = (
    (
        "Incidents (alerts)",
        "red",
        'sum by (alertname, instance, engine) (ALERTS{alertstate="firing", incident_kind=~".+"})',
    ),
    ("Incidents (kvlens)", "orange", f"sum({s.DASHBOARD_OPEN_INCIDENTS}) > 0"),
)
"""What draws marks on every board: name, colour, expression."""


def stock_sum(name: str, **labels: str) -> str:
    """Rate of a vLLM counter summed per engine, under both of its names."""
    rate = vllm(name, window=RATE, func="rate", **{**ENGINE, **labels})
    return f"sum by (instance, {s.LABEL_ENGINE}) ({rate})"
