package relay

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// adopt takes the pipe lock that the desired mode needs, raises the epoch and then every gate. It does not read the
// table before that is complete. A stream that does not answer is left out after a while, if others do: its events wait
// until it answers, and then another adoption examines all streams.
func (l *leadership) adopt(ctx context.Context) (transition, error) {
	st, err := l.activity.state(ctx)
	if err != nil {
		pause.About(ctx, 200*time.Millisecond)
		return onOver, err
	}
	if l.gates != nil && st.Owner != l.gates.owner {
		return onOver, outbox.ErrSuperseded
	}
	alone, err := l.takePipe(ctx, st.Desired == outbox.ModePoll)
	if err != nil {
		return onOver, err
	}
	// Only a state that was read under the lock is valid.
	if st, err = l.activity.state(ctx); err != nil {
		return onOver, err
	}
	l.o.Sweeper.Rest() // its connections may lead to a server that was the primary before
	if err := l.raise(ctx, st); err != nil {
		pause.About(ctx, 200*time.Millisecond)
		return onOver, err
	}
	if err := l.sweeps.Refresh(ctx); err != nil {
		return onOver, err
	}
	if l.wantedLayout() != l.gates.layout && len(l.gates.away) == 0 {
		return onWantLayout, nil
	}
	l.health.clear(conditionLayout) // it may be that only the answer of a change was lost
	if l.o.Spread != nil {
		l.o.Spread.done = true
		return onStop, nil
	}
	if alone {
		return onWantStream, nil
	}
	return onWantPoll, nil
}

// takePipe gets the pipe lock: shared for polling; exclusive for streaming, or shared for the time being when pollers
// on other instances still hold it.
func (l *leadership) takePipe(ctx context.Context, poll bool) (alone bool, err error) {
	if !poll && !l.exclusive {
		if l.exclusive, err = l.locks.TryPipe(ctx, true); err != nil {
			return false, err
		}
	}
	if !poll && l.exclusive {
		if l.shared {
			l.shared = false
			return true, l.locks.DropPipe(ctx, false)
		}
		return true, nil
	}
	for !l.shared {
		if l.shared, err = l.locks.TryPipe(ctx, false); err != nil {
			return false, err
		}
		if !l.shared {
			pause.About(ctx, 200*time.Millisecond)
		}
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
	}
	if l.exclusive {
		l.exclusive = false
		return false, l.locks.DropPipe(ctx, true)
	}
	return false, nil
}

// raise writes the new owner and raises the gates of all streams. A gate that has seen a higher epoch than the table
// (the database was restored to an earlier time) is overtaken, as long as the table names us.
func (l *leadership) raise(ctx context.Context, st outbox.State) error {
	epoch, wentBack := max(st.Owner.Epoch, l.fence)+1, l.fence > 0
	l.fence = 0
	l.owner = st.Owner
	if l.gates == nil {
		l.activity.own(st.Owner) // under which the slot is kept until then: Redis may be gone for long
	}
	l.absent = absent{streams: map[string]left{}}
	if l.gates != nil {
		l.absent.before = l.gates.away
	}
	for {
		next := outbox.Adoption{
			From: st.Owner.Epoch, To: outbox.Owner{Source: st.Owner.Source, Epoch: epoch, Nonce: newNonce()},
			Holder: l.o.Holder, WentBack: wentBack,
		}
		f, err := l.bind(ctx, st)
		if err != nil {
			return err
		}
		next.Sink, next.Suspects, next.Delivered = f.server, f.suspects, f.delivered
		if f.partial || len(l.absent.streams) > 0 {
			next.Sink = incomplete
		}
		if f.beyond > 0 { // noted with this adoption: who is killed behind it has not seen it for nothing
			epoch = max(epoch, f.beyond+1)
			next.To.Epoch, next.WentBack = epoch, true
		}
		ok, err := l.o.Store.Adopt(ctx, next)
		if err != nil {
			return err
		}
		if !ok {
			return outbox.ErrSuperseded
		}
		l.reconciler.uncounted.Store(true)
		l.owner = next.To
		// The owner before may have changed the layout until the adoption.
		err = l.persist(ctx, func() (err error) { st, err = l.check(ctx); return err }, superseded, func(error) {})
		if err != nil {
			return err
		}
		l.gates = newGates(next.To, st.Layout, l.o.Sink, l.o.Store)
		l.gates.leave(l.absent.streams, time.Now().Add(l.partial.Next()))
		l.leaving.Store(l.gates)
		l.activity.own(next.To)
		if err = l.raiseGates(ctx, f.intact); err == nil {
			err = l.awaitLayout(ctx)
		}
		if err == nil {
			err = l.repair(ctx)
		}
		var fenced *outbox.FencedError
		switch {
		case err == nil && len(l.gates.away) > 0:
			l.health.degrade(conditionAdopt, l.absent.text())
			return nil
		case err == nil:
			l.partial.Reset()
			return nil
		case errors.As(err, &fenced):
		case errors.Is(err, outbox.ErrGap):
			clear(l.absent.streams) // it may be that one of them answers
		case !outbox.Alone(err):
			return err
		case len(l.absent.streams) == 0: // each of them has failed
			l.partial.Wait(ctx)
		}
		if st, err = l.check(ctx); err != nil {
			return err
		}
		if fenced != nil {
			l.log.Warn("a gate is ahead of the table; overtaking it", "stream", fenced.Stream, "gate_epoch",
				fenced.Epoch, "epoch", epoch)
			epoch, wentBack = max(fenced.Epoch, epoch), true
		}
		epoch++
	}
}

// repair makes the streams whole. Only then the losses can be counted that it cannot restore.
func (l *leadership) repair(ctx context.Context) error {
	var away map[string]error
	l.absent.since = time.Now()
	owned := func(ctx context.Context) error { _, err := l.check(ctx); return err }
	err := l.persist(ctx, func() (err error) { away, err = l.reconciler.run(ctx, l.owner, l.gates, owned); return err },
		func(err error) bool { return finished(err) || superseded(err) || l.leave(away, l.owner) },
		func(err error) {
			if l.health.fail(conditionRestore, err.Error()) {
				l.log.Warn("cannot reconcile the streams with the outbox; retrying", "err", err)
			}
		})
	l.reconciler.uncounted.Store(true)
	if err == nil {
		l.health.clear(conditionRestore)
		l.housekeeper.whole.Store(l.gates)
	}
	return err
}

// found is the state of the sink at an adoption.
type found struct {
	// server is the one that is published to from now on; see stream.Servers.
	server string
	// suspects are the streams that may lack events or whose gates may lack entries. intact are the streams that have a
	// gate which is as new as the table expects and has lost none of its entries.
	suspects []outbox.StreamState
	intact   map[string]bool
	// partial is set if some servers do not answer.
	partial bool
	// delivered is whether any event was ever settled.
	delivered bool
	// beyond is the epoch of a gate that has seen a later owner than the table; 0 if none has.
	beyond int64
}

// incomplete is the name of the server in the table if the adoption has left out streams, or servers: no server has it,
// so the next adoption suspects every stream, and no follower publishes.
const incomplete = "incomplete"

// absent are the streams that an adoption leaves out, because they do not answer, or refuse it, and others do not.
type absent struct {
	streams map[string]left
	// before are those that the adoption before left out. The others do not wait for them again.
	before map[string]left
	// since is when a step of the adoption failed first, or the repairs began. known is how many streams there are.
	since time.Time
	known int
}

// late reports whether the others have waited long enough for a step that fails, of some streams or of all.
func (a *absent) late(why map[string]error) bool {
	if a.since.IsZero() {
		a.since = time.Now()
	}
	again := len(a.before) > 0
	for stream := range why {
		again = again && a.before[stream].why != nil
	}
	return again || time.Since(a.since) >= blockedWait
}

func (a *absent) text() string {
	names := slices.Sorted(maps.Keys(a.streams))
	return fmt.Sprintf("nothing is published to %s until it can be adopted: %v", strings.Join(names, ", "),
		a.streams[names[0]].why)
}

// leave reports whether the adoption begins again: without the streams that fail, once the others have waited long
// enough, or with all of them if no other is left. A change of the layout needs all of them. repairing is the owner if
// repairs fail.
func (l *leadership) leave(why map[string]error, repairing outbox.Owner) bool {
	a := &l.absent
	if len(why) == 0 || l.o.Spread != nil || !a.late(why) {
		return false
	}
	if len(a.streams)+len(why) >= a.known {
		again := len(a.streams) > 0
		clear(a.streams)
		return again
	}
	for stream, err := range why {
		a.streams[stream] = left{err, repairing}
	}
	l.log.Warn("some streams cannot be adopted; the others are published to", "why", a.text())
	return true
}

// bind chooses the server to publish to. It checks whether the server is the one of the last adoption and has the
// events that were published there. It retries temporary failures.
func (l *leadership) bind(ctx context.Context, st outbox.State) (f found, err error) {
	var seen twin
	l.absent.since = time.Time{}
	err = l.persist(ctx, func() (err error) { f, err = l.tryBind(ctx, st, &seen); return err }, never,
		func(err error) { l.refused(ctx, err) })
	return f, err
}

// refused reports why the streams cannot be adopted. If another database owns them, or a copy of this one does, the
// table records it as well: an operator must act, and may query another instance.
func (l *leadership) refused(ctx context.Context, err error) {
	is := conditionAdopt
	switch {
	case errors.As(err, new(*outbox.ForeignError)):
		is = conditionForeign
	case errors.As(err, new(*outbox.TwinError)):
		is = conditionTwin
	}
	if is != conditionAdopt {
		_, _ = l.o.Store.SetActive(ctx, l.owner.Epoch, outbox.ModeStandby, 0, is+": "+err.Error())
	}
	for _, isNot := range []string{conditionAdopt, conditionForeign, conditionTwin} {
		if isNot != is {
			l.health.clear(isNot)
		}
	}
	if l.health.fail(is, err.Error()) && is == conditionTwin {
		l.log.Error("a copy of this database, or its original, is led by another relay", "why", err)
	}
}

func (l *leadership) tryBind(ctx context.Context, st outbox.State, seen *twin) (f found, err error) {
	list, err := l.o.Store.Streams(ctx)
	if err != nil {
		return f, err
	}
	absent := &l.absent
	absent.known = len(list)
	streams := slices.DeleteFunc(outbox.StreamNames(list), func(s string) bool { return absent.streams[s].why != nil })
	actx, cancel := context.WithTimeout(ctx, publishTimeout)
	f.server, err = l.o.Sink.Bind(actx)
	cancel()
	if outbox.Alone(err) && l.o.Spread == nil && absent.late(nil) {
		f.partial, err = true, nil
	}
	if err == nil {
		err = l.alone(ctx, st, seen)
	}
	if err != nil || len(streams) == 0 {
		return f, err
	}
	noted, err := l.o.Store.Newest(ctx)
	if err != nil {
		return f, err
	}
	states, err := l.o.Sink.Look(ctx, st.Owner.Source, streams, noted) // for as long as there is something to read
	if outbox.Alone(err) {
		away := map[string]error{}
		states = slices.DeleteFunc(states, func(s outbox.StreamState) bool {
			if s.Err != nil {
				away[s.Stream] = s.Err
			}
			return s.Err != nil
		})
		if l.leave(away, outbox.Owner{}) && len(absent.streams) > 0 {
			err = nil
		}
	}
	if err != nil {
		return f, err
	}
	ungated, err := l.o.Store.Ungated(ctx)
	if err != nil {
		return f, err
	}
	for i, s := range states {
		states[i].Unknown = s.Unknown || s.Last != "" && slices.Contains(ungated, s.Stream)
	}
	return f, l.suspect(ctx, st, &f, states)
}

// suspect determines the streams that may lack settled events: all of them, if the server is another process than at
// the last adoption; otherwise those that are missing, or whose gate is missing or behind the table or the stream.
// Raising the gates then finds out which events are missing. Before any event was delivered, none can be.
func (l *leadership) suspect(ctx context.Context, st outbox.State, f *found, states []outbox.StreamState) error {
	other := f.server != st.Sink && (f.server != "" || st.Sink == incomplete)
	f.intact = map[string]bool{}
	var gone []string
	for _, s := range states {
		f.intact[s.Stream] = s.Gate && !s.Forgot && s.Missing == 0
		if s.Beyond(st.Owner) {
			f.beyond = max(f.beyond, s.Epoch)
		}
		if !s.Gate {
			gone = append(gone, s.Stream)
		}
		if other || !s.Intact() || s.Missing > 0 {
			f.suspects = append(f.suspects, s)
		}
	}
	if len(f.suspects) == 0 {
		return nil
	}
	var err error
	if f.delivered, err = l.o.Store.Delivered(ctx); err != nil {
		return err
	}
	if !f.delivered { // what is in a stream is there, all the same
		f.suspects = slices.DeleteFunc(f.suspects, func(s outbox.StreamState) bool {
			return s.Last == "" || s.Intact()
		})
		return nil
	}
	if other && st.Sink != "" && st.Sink != incomplete {
		l.log.Warn("the sink was restarted, or is another server: looking whether it has lost what was settled",
			"server", f.server)
	}
	if len(gone) > 0 {
		l.o.Sink.Missed(len(gone))
		l.log.Error("the sink has lost streams that were published to: it was flushed, restored, or is another "+
			"server", "streams", gone)
	}
	return nil
}

// raiseGates raises the gate of every known stream that is not absent and retries temporary failures.
func (l *leadership) raiseGates(ctx context.Context, intact map[string]bool) error {
	var away map[string]error
	l.absent.since = time.Time{}
	err := l.persist(ctx, func() (err error) { away, err = l.tryGates(ctx, intact); return err },
		func(err error) bool { return displaced(err) || l.leave(away, outbox.Owner{}) },
		func(err error) { l.refused(ctx, err) })
	if err == nil {
		l.health.clear(conditionAdopt)
		l.health.clear(conditionForeign)
		l.health.clear(conditionTwin)
	}
	return err
}

// tryGates returns, with an error, the streams that fail although others may not. It ends early if that takes long.
func (l *leadership) tryGates(ctx context.Context, intact map[string]bool) (away map[string]error, err error) {
	streams, err := l.o.Store.Streams(ctx)
	if err != nil {
		return nil, err
	}
	streams = slices.DeleteFunc(streams, func(s outbox.Stream) bool { return l.gates.away[s.Name].why != nil })
	away = map[string]error{}
	var first error
	began := time.Now()
	for _, s := range streams {
		actx, cancel := context.WithTimeout(ctx, publishTimeout)
		err := l.gates.adopt(actx, s, intact[s.Name])
		cancel()
		if err == nil {
			l.gates.ready(s)
			continue
		}
		if !outbox.Alone(err) {
			return nil, err
		}
		away[s.Name], first = err, cmp.Or(first, err)
		if time.Since(began) > publishTimeout {
			break
		}
	}
	if first != nil {
		return away, first
	}
	return nil, l.o.Store.Gated(ctx, outbox.StreamNames(streams))
}

func newNonce() outbox.Nonce {
	var n outbox.Nonce
	_, _ = rand.Read(n[:]) // never fails: crypto/rand ends the program instead
	return n
}

// A copy of a server's files has the table of the original and the same identity for the sink. Each would overtake the
// other's gates again and again. So a leader signs in the sink that it is alive, and no instance adopts while a leader
// on another server signs.

// twin holds the sign of a leader on another server. renewed is set when that leader has signed again. A leader whose
// Postgres was restarted, or replaced by its standby, does not sign again.
type twin struct {
	sign    *outbox.Sign
	renewed bool
}

// alone signs, and returns an error if another leader does. seen holds the results of previous calls.
func (l *leadership) alone(ctx context.Context, st outbox.State, seen *twin) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	m := l.member(st)
	other, err := l.o.Sink.Alive(ctx, st.Owner.Source, m, seen.sign)
	if err != nil {
		return err
	}
	if other != nil {
		l.signed.Store(nil)
		seen.renewed = seen.renewed || seen.sign != nil && seen.sign.Text != other.Text
		if seen.sign = other; seen.renewed {
			return &outbox.TwinError{Holder: other.Holder}
		}
		return fmt.Errorf("%s, which has led on another server of Postgres, may still be at work", other.Holder)
	}
	l.signed.Store(&signed{source: st.Owner.Source, member: m})
	l.health.clear(conditionTwin)
	return nil
}

// member identifies this process, on the server of Postgres that st is read from.
func (r *Relay) member(st outbox.State) outbox.Member {
	return outbox.Member{ID: r.id, Server: st.Server, Holder: r.o.Holder}
}

// signed is a sign of life.
type signed struct {
	source uuid.UUID
	member outbox.Member
}

// sign repeats the sign of life in every phase of the leader. It ends with the session that has the leader's lock.
func (l *leadership) sign(ctx context.Context) {
	for pause.For(ctx, time.Second) == nil {
		if s := l.signed.Load(); s != nil {
			actx, cancel := context.WithTimeout(ctx, publishTimeout)
			_, _ = l.o.Sink.Alive(actx, s.source, s.member, nil) // if it is refused, the gates tell
			cancel()
		}
	}
}
