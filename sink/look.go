package sink

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// Look implements stream.Sink.
func (s *Sink) Look(ctx context.Context, source uuid.UUID, streams []string, noted map[string]string) (
	[]outbox.StreamState, error,
) {
	var calls []streamCall
	for _, stream := range streams {
		if !s.silent(ctx, stream) { // it would use up the time of the others
			args := append(keys(stream, source), source.String(), s.o.Source, s.alone(), noted[stream])
			calls = append(calls, streamCall{stream: stream, args: args})
		}
	}
	pctx, cancel := context.WithTimeout(ctx, pageTimeout)
	cmds := runAll(pctx, s.o.Client, lookScript, calls)
	cancel()
	out := make([]outbox.StreamState, len(streams))
	var alone error
	for i, stream := range streams {
		var reply []any
		err := errSilent
		if len(calls) > 0 && calls[0].stream == stream {
			reply, err = cmds[0].Slice()
			calls, cmds = calls[1:], cmds[1:]
		}
		switch {
		case err != nil:
		case text(reply, 0) == "FOREIGN":
			err = s.foreign(stream, reply)
		case len(reply) != 8:
			err = fmt.Errorf("unexpected reply to the look script")
		}
		if err = s.failed(stepLook, stream, err); outbox.Alone(err) {
			out[i] = outbox.StreamState{Stream: stream, Err: err}
			alone = cmp.Or(alone, err)
			continue
		}
		if err != nil {
			return nil, err
		}
		out[i] = outbox.StreamState{
			Stream: stream, Gate: number(reply, 0) == 1, Now: time.UnixMilli(number(reply, 2)), Last: text(reply, 3),
			Forgot: number(reply, 4) == 1, Behind: number(reply, 5) == 1, Unknown: number(reply, 7) == 1,
			Missing: max(s.memory(stream).Load()-number(reply, 1), 0),
		}
		raise(s.memory(stream), number(reply, 1)) // the next adoption means this gate, not an older one
		epoch, nonce, _ := strings.Cut(text(reply, 6), "|")
		out[i].Epoch, _ = strconv.ParseInt(epoch, 10, 64) // 0 without an owner
		out[i].Nonce = nonce
		if number(reply, 5) == unsure && out[i].Gate && !out[i].Forgot {
			if out[i].Behind, err = s.behind(ctx, stream, out[i].Last); err != nil {
				return nil, err
			}
		}
	}
	return out, alone
}
