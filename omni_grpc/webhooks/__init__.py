"""Webhooks: who is told of a job's states by POST, what is owed, and the sender that delivers it."""

from omni_grpc.webhooks.schedule import Schedule
from omni_grpc.webhooks.secrets_file import Secret, Secrets, read_secrets
from omni_grpc.webhooks.signature import signed
from omni_grpc.webhooks.webhooks import AskedWebhook, Webhooks

__all__ = ["AskedWebhook", "Schedule", "Secret", "Secrets", "Webhooks", "read_secrets", "signed"]
