package sink

import (
	"context"
	"crypto/sha1" //nolint:gosec // it is how Redis names scripts
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"posthaste/outbox"
)

//go:embed lua/ids.lua
var idsLua string

//go:embed lua/gate.lua
var gateLua string

//go:embed lua/register.lua
var registerLua string

//go:embed lua/adopt.lua
var adoptLua string

//go:embed lua/publish.lua
var publishLua string

//go:embed lua/check.lua
var checkLua string

//go:embed lua/confirm.lua
var confirmLua string

//go:embed lua/settle.lua
var settleLua string

//go:embed lua/forget.lua
var forgetLua string

//go:embed lua/recall.lua
var recallLua string

//go:embed lua/tail.lua
var tailLua string

//go:embed lua/look.lua
var lookLua string

//go:embed lua/trim.lua
var trimLua string

//go:embed lua/regroup.lua
var regroupLua string

//go:embed lua/observe.lua
var observeLua string

//go:embed lua/dropgroup.lua
var dropGroupLua string

//go:embed lua/drop.lua
var dropLua string

//go:embed lua/leave.lua
var leaveLua string

//go:embed lua/alive.lua
var aliveLua string

//go:embed lua/replay.lua
var replayLua string

//go:embed lua/replaybegin.lua
var replayBeginLua string

//go:embed lua/replaynote.lua
var replayNoteLua string

var (
	adoptScript   = newScript(idsLua + gateLua + registerLua + adoptLua)
	publishScript = newScript(idsLua + gateLua + registerLua + publishLua)
	checkScript   = newScript(idsLua + gateLua + registerLua + checkLua)
	confirmScript = newScript(idsLua + gateLua + confirmLua)
	settleScript  = newScript(idsLua + gateLua + settleLua)
	forgetScript  = newScript(idsLua + gateLua + forgetLua)
	recallScript  = newScript(idsLua + gateLua + recallLua)
	lookScript    = newScript(idsLua + gateLua + registerLua + lookLua)
	aliveScript   = newScript(aliveLua)
	tailScript    = newScript(tailLua)
	trimScript    = newScript(idsLua + trimLua)
	regroupScript = newScript(idsLua + regroupLua)
	observeScript = newReader(idsLua + observeLua)

	dropScript      = newScript(idsLua + gateLua + registerLua + dropLua)
	leaveScript     = newScript(idsLua + gateLua + registerLua + leaveLua)
	dropGroupScript = newScript(idsLua + dropGroupLua)

	replayScript      = newScript(idsLua + gateLua + registerLua + replayLua)
	replayBeginScript = newScript(replayBeginLua)
	replayNoteScript  = newScript(replayNoteLua)
)

// script is a Lua script with its digest in Redis.
type script struct {
	text, sha string
	// eval and evalsha are the commands that call it.
	eval, evalsha string
}

func newScript(text string) *script {
	sum := sha1.Sum([]byte(text)) //nolint:gosec // it is how Redis names scripts
	return &script{text: text, sha: hex.EncodeToString(sum[:]), eval: "eval", evalsha: "evalsha"}
}

// newReader returns a script that only reads, so that its caller needs no right to write.
func newReader(text string) *script {
	sc := newScript(text)
	sc.eval, sc.evalsha = "eval_ro", "evalsha_ro"
	return sc
}

// processor is what runs commands: a client, a pinned connection.
type processor interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// pipeliner is what runs pipelines.
type pipeliner interface {
	Pipeline() redis.Pipeliner
}

// run calls a script; args begin with the number of keys.
func run(ctx context.Context, c processor, sc *script, args []any) ([]any, error) {
	return process(ctx, c, sc, append([]any{"evalsha", sc.sha}, args...))
}

// demands bounds how often a script may demand more keys, demandedKeys how many there are room for in a full batch.
const (
	demands      = 5
	demandedKeys = 64
)

// process calls a script. args begin with evalsha and the digest, and are unchanged afterwards. A script whose keys
// depend on the data demands them before it writes; the call is then repeated with them.
func process(ctx context.Context, c processor, sc *script, args []any) (reply []any, err error) {
	for range demands {
		reply, err = processOnce(ctx, c, sc, args)
		if text(reply, 0) != "KEYS" {
			break
		}
		n := 3 + args[2].(int) //nolint:forcetypeassert // the number of keys
		args = slices.Concat(args[:2], []any{n - 3 + len(reply) - 1}, args[3:n], reply[1:], args[n:])
	}
	return reply, err
}

// processOnce makes one call. A server that does not know the script has done nothing, so sending the text instead is
// safe.
func processOnce(ctx context.Context, c processor, sc *script, args []any) ([]any, error) {
	cmd := redis.NewCmd(ctx, args...)
	err := c.Process(ctx, cmd)
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		args[0], args[1] = "eval", sc.text
		cmd = redis.NewCmd(ctx, args...)
		err = c.Process(ctx, cmd)
		args[0], args[1] = "evalsha", sc.sha
	}
	if err != nil {
		return nil, err
	}
	if n, ok := cmd.Val().(int64); ok {
		return []any{n}, nil
	}
	return cmd.Slice()
}

// runAll calls a script several times in one pipeline. Every returned command has its own error.
func runAll(ctx context.Context, c pipeliner, sc *script, calls []streamCall) []*redis.Cmd {
	cmds := make([]*redis.Cmd, len(calls))
	pipe := c.Pipeline()
	for i, call := range calls {
		cmds[i] = pipe.Do(ctx, append([]any{sc.evalsha, sc.sha}, call.args...)...)
	}
	_, err := pipe.Exec(ctx)
	unknown := false
	for i, call := range calls {
		// The commands of a refused connection have no error of their own.
		if err != nil && cmds[i].Err() == nil && cmds[i].Val() == nil {
			cmds[i].SetErr(err)
		}
		if redis.HasErrorPrefix(cmds[i].Err(), "NOSCRIPT") {
			cmds[i] = pipe.Do(ctx, append([]any{sc.eval, sc.text}, call.args...)...)
			unknown = true
		}
	}
	if unknown {
		_, _ = pipe.Exec(ctx)
	}
	return cmds
}

// verdict converts a script's refusal to the error of the interface; nil for OK and XADD.
func verdict(stream string, reply []any) error {
	if len(reply) == 0 {
		return errors.New("empty reply from the gate")
	}
	word, _ := reply[0].(string)
	switch word {
	case "OK", "XADD":
		return nil
	case "GAP":
		return outbox.ErrGap
	case "FENCED":
		epoch, err := strconv.ParseInt(text(reply, 1), 10, 64)
		if err != nil {
			return fmt.Errorf("the gate's epoch: %w", err)
		}
		return &outbox.FencedError{Stream: stream, Epoch: epoch}
	}
	return fmt.Errorf("unknown reply from the gate: %q", strings.ToValidUTF8(word, "?"))
}

func text(reply []any, i int) string {
	if i >= len(reply) {
		return ""
	}
	s, _ := reply[i].(string)
	return s
}

func number(reply []any, i int) int64 {
	if i >= len(reply) {
		return 0
	}
	n, _ := reply[i].(int64)
	return n
}
