"""Every kind of sink: what may stand below its name in `sinks:`, and where `gradwatch.sinks` finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

from gradwatch.records.key_limits import Limits
from gradwatch.rules.field_types import Count, Globs, NotNegative, Parameters, Positive, Words, key, unset
from gradwatch.runtime.secret_values import SECRET, SECRET_URL, URL


class ParameterOptions(Parameters):
    """A sink with series of single parameters."""

    params: Literal["off", "worst", "match", "all"] = unset("Which parameters get series of their own.")
    top_k: Count = unset("How many, for params: worst.")
    max_series: Count = unset("At most this many parameter series.")
    match: Globs = unset("Globs on parameter names, for params: match.")


class PrometheusOptions(ParameterOptions):
    """The HTTP endpoint that Prometheus scrapes."""

    listen: Annotated[
        str, Limits(pattern=r"^(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}$")
    ] = unset("HOST:PORT; the local rank is added to the port.")
    file_sd: Annotated[str, Limits(min_length=1, max_length=1_000)] = unset(
        "Folder of Prometheus' file_sd_configs: every process puts itself on the list of targets."
    )
    stall_seconds: Positive = unset("The least time without a step after which the run counts as stalled.")


_LEAST_CAP = 1 << 20


def _no_cap_or_enough(max_bytes: int) -> int:
    if 0 < max_bytes < _LEAST_CAP:
        from pydantic_core import PydanticCustomError  # not at the top: see records/key_limits.py

        raise PydanticCustomError("must_be", "0 (no cap), or at least {least}", {"least": f"{_LEAST_CAP:,}"})
    return max_bytes


class JournalOptions(Parameters):
    """The crash-safe recording of the run."""

    dir: Annotated[str, Limits(min_length=1, max_length=1_000)] = unset(
        "Folder that holds one folder per run."
    )
    params: Literal["sampled", "full"] = unset(
        "Per-parameter norms sampled to keep the cap, or at every step."
    )
    max_bytes: Annotated[int, Limits(ge=0, le=1 << 46, check=_no_cap_or_enough)] = unset(
        "Cap on a run's journal, in bytes, 1,048,576 at least; 0 = no cap."
    )


class LogOptions(Parameters):
    """One line per transition on stderr."""

    format: Literal["console", "json"] = unset("console for people, json for programs.")


Name = Annotated[str, Limits(min_length=1, max_length=128)]
Url = Annotated[str, Limits(pattern=URL)]


class AlertmanagerOptions(Parameters):
    """Alerts posted straight to Alertmanager, without a Prometheus."""

    url: Url = unset("Base URL of Alertmanager, e.g. http://127.0.0.1:9093.")
    hold_seconds: NotNegative = unset(
        "An alert stays active at least this long, so that Alertmanager can notify."
    )
    renew_seconds: Annotated[float, Limits(ge=1)] = unset("How often a firing alert is sent again.")
    labels: Words = unset("Further labels of every alert.")
    runbooks: Url = unset("Where runbooks are; the name of the alert is appended.")
    dashboard: Url = unset("The dashboard of a run; ?var-run_id= is appended.")
    token_file: Annotated[str, Limits(min_length=1, max_length=1_000)] = unset("File with a bearer token.")


class TextfileOptions(Parameters):
    """A file for node_exporter's textfile collector."""

    dir: Annotated[str, Limits(min_length=1, max_length=1_000)] = key(
        description="The collector's directory."
    )
    every_seconds: Annotated[float, Limits(ge=1)] = unset("How often the file is written.")


class PushgatewayOptions(Parameters):
    """The outcome of the run, pushed once, when it ends.

    A Pushgateway is for what outlives a batch job, and keeps it until it is deleted: by Prometheus' own guidance
    (https://prometheus.io/docs/practices/pushing) nothing else is pushed, so there is no interval. A run that goes on
    is watched at the endpoint that Prometheus scrapes (`prometheus`), by `textfile` where no port may be open, or by
    `otlp`. What an earlier attempt of the run left is deleted at the start; a killed process pushes nothing.
    """

    url: Url = unset("Base URL of the Pushgateway, e.g. http://127.0.0.1:9091.")
    job: Annotated[str, Limits(min_length=1, max_length=100)] = unset("The job label; gradwatch.")


class OTLPOptions(Parameters):
    """All metrics but those of single parameters, sent to an OpenTelemetry collector over HTTP."""

    url: Url = unset("Base URL of the collector; http://127.0.0.1:4318. /v1/metrics is appended.")
    every_seconds: Annotated[float, Limits(ge=1)] = unset("How often they are sent; 15.")
    token_file: Annotated[str, Limits(min_length=1, max_length=1_000)] = unset("File with a bearer token.")


class WandbOptions(ParameterOptions):
    """A run of its own in Weights & Biases."""

    project: Name = unset("By default that of the script's own run, then WANDB_PROJECT, then gradwatch.")
    entity: Name = unset("User or team; by default that of the script's own run.")
    group: Name = unset("Runs that belong together; by default that of the script's own run.")
    every: Count = unset("A point every N steps (10), and whenever a rule changes state or acts.")
    alerts: bool = unset("Alert when a rule fires, at most once a minute and rule; true.")


class TensorBoardOptions(ParameterOptions):
    """Event files for TensorBoard."""

    dir: Annotated[str, Limits(min_length=1, max_length=1_000)] = unset(
        "Folder of the event files; tensorboard in the folder of the run."
    )
    every: Count = unset("A point every N steps (10), and whenever a rule changes state or acts.")


class MLflowOptions(ParameterOptions):
    """The script's own MLflow run where there is one, else a new one."""

    tracking_uri: Annotated[str, Limits(min_length=1, max_length=1_000)] = unset(
        "Where MLflow keeps its runs; by default what MLflow is set to."
    )
    experiment: Name = unset("Experiment of a new run; MLFLOW_EXPERIMENT_NAME, then gradwatch.")
    every: Count = unset("A point every N steps (10), and whenever a rule changes state or acts.")


ADDRESS = r"^[^\s@,<>]{1,64}@[^\s@,<>]{1,253}$"
Secret = Annotated[str, Limits(pattern=SECRET)]
SecretUrl = Annotated[str, Limits(pattern=SECRET_URL)]
Address = Annotated[str, Limits(pattern=ADDRESS)]


class MessageOptions(Parameters):
    """The options of every sink that writes to people."""

    group_seconds: NotNegative = unset("How long news is collected for one message; 5.")
    every_seconds: NotNegative = unset("The least time between two messages; 60.")
    severity: Literal["info", "warning", "critical"] = unset(
        "Rules of at least this severity are written of; warning."
    )


class WebhookOptions(MessageOptions):
    """Messages as JSON to an HTTP endpoint."""

    url: SecretUrl = key(description="Where to POST; ${NAME} is the value of an environment variable.")
    body: dict[str, Any] = unset(
        "The JSON to send; $subject $text $status $severity $run_id $host $script $directory are filled in, "
        "$alerts is the list."
    )
    token: Secret = unset("Bearer token: ${NAME} of an environment variable.")


class SlackOptions(MessageOptions):
    """Messages to a Slack channel."""

    url: Secret = unset(
        "Address of the incoming webhook: ${NAME} of an environment variable; ${SLACK_WEBHOOK_URL}."
    )


class EmailOptions(MessageOptions):
    """Messages by e-mail."""

    server: Annotated[
        str, Limits(pattern=r"^(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}$")
    ] = key(description="HOST:PORT of an SMTP server.")
    sender: Address = key(description="The address that messages come from.")
    to: Annotated[list[Address], Limits(min_length=1)] = key(description="Who gets them.")
    tls: Literal["starttls", "tls", "none"] = unset(
        "starttls (ports 25, 587; the default), tls from the first byte (465), or none."
    )
    user: Annotated[str, Limits(min_length=1, max_length=256)] = unset(
        "Login, or ${NAME}; without it there is none."
    )
    password: Secret = unset("${NAME} of an environment variable; ${SMTP_PASSWORD}.")


class SinkKind(NamedTuple):
    """`factory` makes the sink from its options as keywords, or names such a callable as "package.module:attribute".

    A leading dot is `gradwatch.sinks`. `options` is None where they are the factory's own business.
    """

    factory: Callable[..., Any] | str
    options: type[Parameters] | None = None


SINKS: dict[str, SinkKind] = {
    "alertmanager": SinkKind(".alertmanager:AlertmanagerSink", AlertmanagerOptions),
    "email": SinkKind(".notify.smtp:EmailSink", EmailOptions),
    "journal": SinkKind(".journal:JournalSink", JournalOptions),
    "log": SinkKind(".log:LogSink", LogOptions),
    "mlflow": SinkKind(".trackers.mlflow:MLflowSink", MLflowOptions),
    "otlp": SinkKind(".otlp:OTLPSink", OTLPOptions),
    "prometheus": SinkKind(".prometheus.sink:PrometheusSink", PrometheusOptions),
    "pushgateway": SinkKind(".prometheus.pushgateway:PushgatewaySink", PushgatewayOptions),
    "slack": SinkKind(".notify.slack:SlackSink", SlackOptions),
    "tensorboard": SinkKind(".trackers.tensorboard:TensorBoardSink", TensorBoardOptions),
    "textfile": SinkKind(".prometheus.textfile:TextfileSink", TextfileOptions),
    "wandb": SinkKind(".trackers.wandb:WandbSink", WandbOptions),
    "webhook": SinkKind(".notify.webhook:WebhookSink", WebhookOptions),
}
"""By the name in a rule file; `gradwatch.sinks.register_sink` adds to it."""
