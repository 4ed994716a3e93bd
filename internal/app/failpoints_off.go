//go:build !failpoints

package app

import "github.com/redis/go-redis/v9"

// commands does nothing in a build without failpoints.
func commands(redis.UniversalClient) {}
