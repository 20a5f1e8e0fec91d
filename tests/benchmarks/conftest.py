"""What whole programs are started with."""

from tests.commands.conftest import call as call  # a fixture
from tests.commands.conftest import nothing_left_running as nothing_left_running  # a fixture
