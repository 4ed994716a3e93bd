//go:build !failpoints

package app

import "github.com/redis/go-redis/v9"

// commands has package failpoint called for each command of the client.
func commands(redis.UniversalClient) {}
