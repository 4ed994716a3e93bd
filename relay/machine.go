package relay

import "posthaste/outbox"

// phase is a phase of the relay.
type phase string

const (
	phaseStandby  phase = "standby"  // another instance leads; in poll mode this one sweeps too
	phaseAdopt    phase = "adopt"    // take the pipe lock, raise the epoch and every gate
	phaseLayout   phase = "layout"   // settle everything, wait for consumers, change the names of streams
	phasePoll     phase = "poll"     // sweep under the shared pipe lock
	phaseSweep    phase = "sweep"    // sweep under the exclusive pipe lock, until the slot is usable
	phaseHandover phase = "handover" // sweep up to a known place in the WAL
	phaseStream   phase = "stream"   // publish what the slot delivers
	phaseStopped  phase = "stopped"
)

// transition is why a phase ended.
type transition string

const (
	onLed        transition = "led"         // the leader lock is ours
	onWantPoll   transition = "want_poll"   // adopted, and polling is wanted or the pipe is shared
	onWantLayout transition = "want_layout" // adopted, and streams are to have other names
	onWantStream transition = "want_stream" // adopted, alone on the pipe
	onUsable     transition = "usable"      // slot and publication are as they should be
	onReady      transition = "ready"       // swept; the slot may be streamed
	onNotReady   transition = "not_ready"   // the slot refused, or older transactions hold
	onOver       transition = "over"        // toggle, slot error, audit, budget, gap: adopt again, whatever it was
	onLost       transition = "lost"        // leadership is gone
	onStop       transition = "stop"        // the process was asked to stop
)

// machine is the complete mode machine. Every way out of a phase in which something was published leads through adopt:
// events that were published and not settled are then in doubt, and are not published again.
var machine = []struct {
	from phase
	on   transition
	to   phase
}{
	{phaseStandby, onLed, phaseAdopt},
	{phaseAdopt, onWantPoll, phasePoll},
	{phaseAdopt, onWantStream, phaseSweep},
	{phaseAdopt, onWantLayout, phaseLayout},
	{phaseAdopt, onOver, phaseAdopt},
	{phaseLayout, onOver, phaseAdopt},
	{phasePoll, onOver, phaseAdopt},
	{phaseSweep, onUsable, phaseHandover},
	{phaseSweep, onOver, phaseAdopt},
	{phaseHandover, onReady, phaseStream},
	{phaseHandover, onNotReady, phaseSweep},
	{phaseHandover, onOver, phaseAdopt},
	{phaseStream, onOver, phaseAdopt},
}

// next returns the phase that follows. Losing leadership and stopping lead out of every phase.
func (p phase) next(t transition) phase {
	switch t {
	case onLost:
		return phaseStandby
	case onStop:
		return phaseStopped
	}
	for _, m := range machine {
		if m.from == p && m.on == t {
			return m.to
		}
	}
	panic("relay: no transition from " + string(p) + " on " + string(t))
}

// mode is the public name of the phase: in relay_state, in metrics and in the status.
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
