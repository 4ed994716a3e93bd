package redisurl

import (
	"context"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Info returns the fields of sections of INFO. Services that resemble Redis may answer without the lines that name the
// sections, which the client's InfoMap does not survive.
func Info(ctx context.Context, c interface {
	Info(ctx context.Context, sections ...string) *redis.StringCmd
}, sections ...string,
) (map[string]string, error) {
	text, err := c.Info(ctx, sections...).Result()
	return Fields(text), err
}

// Fields returns the fields in an answer of INFO or CLUSTER INFO.
func Fields(text string) map[string]string {
	fields := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(line, ":"); ok {
			fields[name] = strings.TrimSpace(value)
		}
	}
	return fields
}
