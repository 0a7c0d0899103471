"""`.env.example` is what the settings say."""

from deploy.env_example import env_example
from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig
from tests.unit.deploy.compose_files import REPO, in_compose_files, in_example

SETTINGS = {
    f"{cls.model_config['env_prefix']}{name}".upper()
    for cls in (GatewayConfig, DraftConfig, TargetConfig)
    for name in cls.model_fields
}


def test_env_example_equals_the_settings() -> None:
    assert (REPO / ".env.example").read_text() == env_example(), "run make env-example"
    assert in_example() >= SETTINGS


def test_env_example_names_every_variable_of_the_compose_files_and_no_other() -> None:
    assert in_example() - SETTINGS == in_compose_files() - SETTINGS
