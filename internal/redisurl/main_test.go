package redisurl

import (
	"os"
	"testing"

	"posthaste/internal/lab/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }
