package sink

import (
	"context"
	"slices"
	"sync"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
)

// Unknown returns what the servers, or proxies in front of them, keep posthaste from knowing, a text for each cause;
// nil if it knows everything. Publishing does not need it.
func (s *Sink) Unknown(ctx context.Context) ([]string, error) {
	var mu sync.Mutex
	var all []string
	err := s.each(ctx, func(ctx context.Context, c *redis.Client) error {
		list, err := unknown(ctx, c)
		mu.Lock()
		defer mu.Unlock()
		for _, text := range list {
			if !slices.Contains(all, text) {
				all = append(all, text)
			}
		}
		return err
	})
	return all, err
}

func unknown(ctx context.Context, c *redis.Client) (list []string, err error) {
	info, err := infoOf(ctx, c, "memory")
	if err != nil {
		return nil, err
	}
	p, err := identify(ctx, c)
	if err != nil {
		return nil, err
	}
	switch {
	case info == nil && p == (instance{}):
		list = append(list, "Redis refuses INFO: its version, memory, eviction policy, persistence and identity are "+
			"unknown, and a restart is noticed by missing events only")
	case p == (instance{}):
		list = append(list, "Redis does not identify itself: a restart is noticed by missing events only")
	case info == nil:
		list = append(list, "Redis refuses a part of INFO: its memory, eviction policy and persistence are unknown")
	}
	if p != (instance{}) {
		v, err := compare(ctx, c, p)
		switch {
		case err != nil:
			return nil, err
		case v.history:
			list = append(list, "Redis has another identity on each connection: a restart is noticed by missing "+
				"events only")
		case v.run:
			list = append(list, "Redis has another run id on each connection: a restart is noticed by its replication "+
				"id")
		}
	}
	switch err := c.ConfigGet(ctx, "appendfsync").Err(); {
	case redisurl.Refused(err):
		list = append(list, "Redis refuses CONFIG GET: its size limits and appendfsync are unknown")
	case err != nil:
		return nil, err
	}
	return list, nil
}
