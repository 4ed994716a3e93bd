//go:build failpoints

package app

import (
	"context"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/failpoint"
)

// commands makes the client call package failpoint for each command.
func commands(client redis.UniversalClient) { client.AddHook(crossing{}) }

type crossing struct{}

// name is the command's name. Scripts have the same name whether they are called by text or by hash.
func name(cmd redis.Cmder) string { return strings.Replace(cmd.FullName(), "evalsha", "eval", 1) }

// shown returns a script's keys, and the arguments of publish.lua that precede its events.
func shown(cmd redis.Cmder) (list []any) {
	args := cmd.Args()
	for _, v := range args[min(2, len(args)):min(16, len(args))] {
		if ids, ok := v.([]byte); ok {
			v = hex.EncodeToString(ids)
		}
		list = append(list, fmt.Sprint(v))
	}
	return list
}

func (crossing) DialHook(next redis.DialHook) redis.DialHook { return next }

func (crossing) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		failpoint.Before(name(cmd), shown(cmd)...)
		err := next(ctx, cmd)
		var reply any
		if c, ok := cmd.(*redis.Cmd); ok {
			reply = c.Val()
		}
		failpoint.After(name(cmd), failpoint.Answer(reply, err)...)
		return err
	}
}

func (crossing) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		failpoint.Before("pipeline " + name(cmds[0]))
		defer failpoint.After("pipeline " + name(cmds[0]))
		return next(ctx, cmds)
	}
}
