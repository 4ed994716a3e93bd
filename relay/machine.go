package relay

import "posthaste/outbox"

// phase is what a relay is doing.
type phase string

const (
	phaseStandby  phase = "standby"  // another instance leads; in poll mode this one sweeps too
	phaseAdopt    phase = "adopt"    // take the pipe lock, raise the epoch and every gate
	phasePoll     phase = "poll"     // sweep under the shared pipe lock
	phaseSweep    phase = "sweep"    // sweep under the exclusive pipe lock, until the slot is usable
	phaseHandover phase = "handover" // sweep up to a known place in the WAL
	phaseStream   phase = "stream"   // publish what the slot delivers
	phaseStopped  phase = "stopped"
)

// event is why a phase ended.
type event string

const (
	evLed        event = "led"         // the leader lock is ours
	evWantPoll   event = "want_poll"   // adopted, and polling is wanted or the pipe is shared
	evWantStream event = "want_stream" // adopted, alone on the pipe
	evUsable     event = "usable"      // slot and publication are as they should be
	evReady      event = "ready"       // swept; the slot may be streamed
	evNotReady   event = "not_ready"   // the slot refused, or older transactions hold
	evOver       event = "over"        // toggle, slot error, audit, budget, gap: adopt again, whatever it was
	evLost       event = "lost"        // leadership is gone
	evStop       event = "stop"        // the process was asked to stop
)

// machine is the whole mode machine. Every way out of a phase in which something was published leads through adopt:
// what was published and not settled becomes the doubt set, and is not published again.
var machine = []struct {
	from phase
	on   event
	to   phase
}{
	{phaseStandby, evLed, phaseAdopt},
	{phaseAdopt, evWantPoll, phasePoll},
	{phaseAdopt, evWantStream, phaseSweep},
	{phaseAdopt, evOver, phaseAdopt},
	{phasePoll, evOver, phaseAdopt},
	{phaseSweep, evUsable, phaseHandover},
	{phaseSweep, evOver, phaseAdopt},
	{phaseHandover, evReady, phaseStream},
	{phaseHandover, evNotReady, phaseSweep},
	{phaseHandover, evOver, phaseAdopt},
	{phaseStream, evOver, phaseAdopt},
}

// next returns the phase that follows. Losing leadership and stopping lead out of every phase.
func (p phase) next(e event) phase {
	switch e {
	case evLost:
		return phaseStandby
	case evStop:
		return phaseStopped
	}
	for _, t := range machine {
		if t.from == p && t.on == e {
			return t.to
		}
	}
	panic("relay: no transition from " + string(p) + " on " + string(e))
}

// mode is what the phase is called outside: in relay_state, in metrics and in the status.
func (p phase) mode() outbox.Mode {
	switch p {
	case phaseStream:
		return outbox.ModeCDC
	case phasePoll, phaseSweep, phaseHandover:
		return outbox.ModePoll
	default:
		return outbox.ModeStandby
	}
}
