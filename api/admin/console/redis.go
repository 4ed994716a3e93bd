package console

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
)

type infoMap map[string]string

func (m infoMap) int(name string) int64 {
	n, _ := strconv.ParseInt(m[name], 10, 64)
	return n
}

// redisInfo returns what Redis says of its memory.
func redisInfo(ctx context.Context, client redis.UniversalClient) (infoMap, error) {
	text, err := client.Info(ctx, "memory").Result()
	if err != nil {
		return nil, err
	}
	m := infoMap{}
	for line := range strings.SplitSeq(text, "\r\n") {
		if k, v, ok := strings.Cut(line, ":"); ok {
			m[k] = v
		}
	}
	return m, nil
}

func integer(v any) int64 {
	n, _ := v.(int64)
	return n
}

// str is text from anybody who may write to Redis.
func str(v any) string {
	s, _ := v.(string)
	return strings.ToValidUTF8(s, "?")
}

// sortByEntry orders events of several streams by when they were added.
func sortByEntry(events []Event) {
	slices.SortStableFunc(events, func(a, b Event) int {
		am, as := splitEntry(a.EntryID)
		bm, bs := splitEntry(b.EntryID)
		return cmp.Or(cmp.Compare(am, bm), cmp.Compare(as, bs))
	})
}

func splitEntry(id string) (ms, seq uint64) {
	m, s, _ := strings.Cut(id, "-")
	ms, _ = strconv.ParseUint(m, 10, 64)
	seq, _ = strconv.ParseUint(s, 10, 64)
	return ms, seq
}
