package relay

import (
	"testing"

	"pgregory.net/rapid"
)

// outcomes are the events that can end a phase, including those that end every phase.
func outcomes(p phase) []transition {
	out := []transition{onLost, onStop}
	for _, t := range machine {
		if t.from == p {
			out = append(out, t.on)
		}
	}
	return out
}

// Whatever happens, in whatever order: nothing is published before an adoption by this leadership, nothing is streamed
// without a hand-over, and after a phase that published the next one that publishes is behind another adoption, unless
// it continues the same sweep.
func TestMachineNeverPublishesWithoutAdoption(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := phaseStandby.next(onLed)
		adopted, streamed := false, false
		for range 60 {
			switch p {
			case phaseAdopt:
				adopted, streamed = true, false
			case phasePoll, phaseSweep, phaseHandover:
				if !adopted || streamed {
					t.Fatalf("%s without adoption (adopted %v, streamed since %v)", p, adopted, streamed)
				}
			case phaseStream:
				if !adopted || streamed {
					t.Fatalf("stream without adoption")
				}
				streamed = true
			case phaseStandby:
				adopted, streamed = false, false
				p = p.next(onLed)
				continue
			case phaseStopped:
				return
			}
			before := p
			p = p.next(rapid.SampledFrom(outcomes(p)).Draw(t, "transition"))
			if p == phaseStream && before != phaseHandover {
				t.Fatalf("stream entered from %s", before)
			}
		}
	})
}
