package app_test

import (
	"os"
	"runtime"
	"testing"

	"posthaste/internal/app"
)

func TestOneProcessor(t *testing.T) {
	const name = "GOMAXPROCS"
	before := runtime.GOMAXPROCS(3)
	defer runtime.GOMAXPROCS(before)
	t.Setenv(name, "3")
	undo := app.OneProcessor()
	if n := runtime.GOMAXPROCS(0); n != 3 {
		t.Errorf("%d processors, where the environment says 3", n)
	}
	undo()
	_ = os.Unsetenv(name) // Setenv restores it
	undo = app.OneProcessor()
	if n := runtime.GOMAXPROCS(0); n != 1 {
		t.Errorf("%d processors, want 1", n)
	}
	undo()
	if n := runtime.GOMAXPROCS(0); n != 3 {
		t.Errorf("%d processors after all, want the 3 of before", n)
	}
}
