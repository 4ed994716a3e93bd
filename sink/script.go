package sink

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"posthaste/outbox"
)

//go:embed lua/*.lua
var luaFiles embed.FS

var (
	adoptScript   = newScript("ids", "gate", "register", "adopt")
	publishScript = newScript("ids", "gate", "register", "publish")
	checkScript   = newScript("ids", "gate", "register", "check")
	confirmScript = newScript("ids", "gate", "confirm")
	settleScript  = newScript("ids", "gate", "settle")
	forgetScript  = newScript("ids", "gate", "forget")
	recallScript  = newScript("ids", "gate", "recall")
	lookScript    = newScript("ids", "gate", "register", "look")
	aliveScript   = newScript("alive")
	tailScript    = newScript("tail")
	trimScript    = newScript("ids", "trim")
	regroupScript = newScript("ids", "regroup")
	observeScript = newReader("ids", "observe")

	dropScript      = newScript("ids", "gate", "register", "drop")
	leaveScript     = newScript("ids", "gate", "register", "leave")
	dropGroupScript = newScript("ids", "dropgroup")

	replayScript      = newScript("ids", "gate", "register", "replay")
	replayBeginScript = newScript("replaybegin")
	replayNoteScript  = newScript("replaynote")
)

// script is a Lua script with its digest in Redis.
type script struct {
	text, sha string
	// eval and evalsha are the commands that call it.
	eval, evalsha string
}

// newScript joins files of the folder lua, without their extension.
func newScript(files ...string) *script {
	text := ""
	for _, name := range files {
		lua, err := luaFiles.ReadFile("lua/" + name + ".lua")
		if err != nil {
			panic(err) // embedded: cannot fail
		}
		text += string(lua)
	}
	return &script{text: text, sha: redis.NewScript(text).Hash(), eval: "eval", evalsha: "evalsha"}
}

// newReader returns a script that only reads, so that its caller needs no right to write.
func newReader(files ...string) *script {
	sc := newScript(files...)
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
