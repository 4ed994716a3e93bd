package consumer

import (
	"context"
	"embed"

	"github.com/redis/go-redis/v9"
)

//go:embed lua/*.lua
var luaFiles embed.FS

// script joins files.
func script(names ...string) *redis.Script {
	var text []byte
	for _, name := range names {
		b, err := luaFiles.ReadFile("lua/" + name + ".lua")
		if err != nil {
			panic(err) // embedded: a missing file is a broken build
		}
		text = append(text, b...)
	}
	return redis.NewScript(string(text))
}

// The scripts are immutable after their creation.
var (
	groupScript   = script("group")
	takeScript    = script("take")
	holdScript    = script("delivered", "hold")
	beginScript   = script("delivered", "begin")
	deadScript    = script("dead")
	leaveScript   = script("leave")
	inspectScript = script("inspect")
	leaseScript   = script("lease")
	readScript    = script("read")
	retryScript   = script("retry")
	headsScript   = script("heads")
)

// once is a call that the client does not repeat by itself. It is for what hands out entries: a repetition after a lost
// reply would return those behind the lost ones, which would then come later, out of order.
type once struct{ redis.Cmder }

// NoRetry is asked by the client.
func (once) NoRetry() bool { return true }

// onceScripter runs scripts once, by process.
type onceScripter struct {
	redis.Scripter
	process func(ctx context.Context, cmd redis.Cmder) error
}

func (c onceScripter) EvalSha(ctx context.Context, sha string, keys []string, args ...any) *redis.Cmd {
	return c.call(ctx, "evalsha", sha, keys, args)
}

func (c onceScripter) Eval(ctx context.Context, text string, keys []string, args ...any) *redis.Cmd {
	return c.call(ctx, "eval", text, keys, args)
}

func (c onceScripter) call(ctx context.Context, name, script string, keys []string, args []any) *redis.Cmd {
	all := []any{name, script, len(keys)}
	for _, k := range keys {
		all = append(all, k)
	}
	cmd := redis.NewCmd(ctx, append(all, args...)...)
	cmd.SetFirstKeyPos(3)
	_ = c.process(ctx, once{cmd}) // the command has it
	return cmd
}
