import pytest
from recording import Numbers, engine

from kvlens.telemetry import facts, semconv
from kvlens.telemetry.assembly.assembler import Assembler
from kvlens.telemetry.semconv import Fallback


@pytest.mark.parametrize("reason", list(Fallback))
def test_the_gauge_says_whether_vllms_own_lookup_is_used(reason):
    numbers = Numbers()
    assembler = Assembler(engine(lookup="exact"), numbers, [])
    series = (semconv.LOOKUP_FALLBACK.name, (str(reason),))
    for active in (True, False):
        assembler.handle((facts.FALLBACK, 0, str(reason), active, "because"))
        assert numbers.gauges[series] == active
