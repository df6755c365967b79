"""JSON schemas of the custom resources in deploy/kubernetes: the fields that are used there, and no others.

Written by hand from the public references of KEDA 2.15 (ScaledObject specification, Prometheus scaler) and of the
Prometheus operator (API reference, monitoring.coreos.com/v1). They find a misspelled or misplaced field. They are not
what a cluster checks: the operators' own definitions are.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
DURATION: Schema = {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def fields(required: str = "", **properties: Schema) -> Schema:
    """An object with these fields alone; those that `required` names, separated by blanks, must be there."""
    return {"type": "object", "properties": properties, "additionalProperties": False, "required": required.split()}


def many(schema: Schema) -> Schema:
    return {"type": "array", "items": schema, "minItems": 1}


def resource(version: str, kind: str, spec: Schema) -> Schema:
    return fields(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=fields("name", name=TEXT, namespace=TEXT, labels=LABELS, annotations=LABELS),
        spec=spec,
    )


SELECTOR = fields("matchLabels", matchLabels=LABELS)
POLICY = fields(
    "type value periodSeconds",
    type={"enum": ["Pods", "Percent"]},
    value={"type": "integer", "minimum": 1},
    periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
)
SCALING = fields(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy={"enum": ["Max", "Min", "Disabled"]},
    policies=many(POLICY),
)
TRIGGER = fields(
    "type metadata",
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    # values of triggers are text, numbers too
    metadata=fields(
        "serverAddress query threshold",
        serverAddress=TEXT,
        query=TEXT,
        threshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"},
        activationThreshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"},
        ignoreNullValues={"enum": ["true", "false"]},
    ),
)
SCALED_OBJECT = resource(
    "keda.sh/v1alpha1",
    "ScaledObject",
    fields(
        "scaleTargetRef triggers",
        scaleTargetRef=fields("name", name=TEXT, kind=TEXT, apiVersion=TEXT),
        pollingInterval=COUNT,
        cooldownPeriod=COUNT,
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        fallback=fields("failureThreshold replicas", failureThreshold=COUNT, replicas=COUNT),
        advanced=fields(horizontalPodAutoscalerConfig=fields(behavior=fields(scaleUp=SCALING, scaleDown=SCALING))),
        triggers=many(TRIGGER),
    ),
)
SECRET_KEY = fields("secret", secret=fields("name key", name=TEXT, key=TEXT))
POD_MONITOR = resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    fields(
        "selector podMetricsEndpoints",
        selector=SELECTOR,
        podMetricsEndpoints=many(
            fields(
                "port",
                port=TEXT,
                path=TEXT,
                interval=DURATION,
                scheme={"enum": ["http", "https"]},
                tlsConfig=fields(ca=SECRET_KEY, serverName=TEXT),
            )
        ),
    ),
)
RULE = {
    "oneOf": [
        fields("record expr", record=TEXT, expr=TEXT, labels=LABELS),
        fields("alert expr", alert=TEXT, expr=TEXT, labels=LABELS, annotations=LABELS, **{"for": DURATION}),
    ]
}
PROMETHEUS_RULE = resource(
    "monitoring.coreos.com/v1",
    "PrometheusRule",
    fields("groups", groups=many(fields("name rules", name=TEXT, interval=DURATION, rules=many(RULE)))),
)
SCHEMAS = {"ScaledObject": SCALED_OBJECT, "PodMonitor": POD_MONITOR, "PrometheusRule": PROMETHEUS_RULE}
