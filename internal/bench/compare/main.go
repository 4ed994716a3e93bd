// Command compare measures two versions of posthaste against each other: a commit, and the working tree. It builds
// both, runs the same `posthaste bench` with each in turns, and prints for every figure the ratio of the two, with
// its spread, or "no difference".
//
//	compare --base=COMMIT [--rounds=N] [--json] [drain|latency|idle|orders [flags]]
//	compare --base=COMMIT [--rounds=N] [--json] --picture=FILE [--rates=N,…] [latency [flags]]
//
// With --picture it draws the latency of both against the rate.
//
// `make bench-compare` calls it. It exits with 0 whatever the figures are, and otherwise only if a step failed. Its
// files are in one temporary folder, which is removed, also after Ctrl-C.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"posthaste/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], cli.IO{Stdout: os.Stdout, Stderr: os.Stderr})
	interrupted := ctx.Err() != nil
	stop()
	switch {
	case err == nil:
		return
	case interrupted:
		err = errors.New("interrupted; everything it created was removed")
	}
	fmt.Fprintln(os.Stderr, "bench-compare:", err)
	os.Exit(1)
}

// leastRounds is the number of rounds needed to distinguish a difference from chance.
const leastRounds = 3

// run is the program without its process.
func run(ctx context.Context, args []string, o cli.IO) (err error) {
	flags := flag.NewFlagSet("bench-compare", flag.ContinueOnError)
	flags.SetOutput(o.Stderr)
	base := flags.String("base", "", "the `commit` to compare the working tree with")
	rounds := flags.Int("rounds", 5, "how often each is measured; at least 3")
	asJSON := flags.Bool("json", false, "print JSON instead of tables")
	picture := flags.String("picture", "", "draw latency against rate into this `file`")
	rates := numbers{100, 200, 500, 1000, 2000, 3000, 4000, 6000, 8000, 10000}
	flags.Var(&rates, "rates", "transactions `per second` of the picture, separated by commas")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	switch {
	case *base == "":
		return errors.New("name the commit to compare the working tree with: make bench-compare BASE=<commit>")
	case *rounds < leastRounds:
		return fmt.Errorf("ROUNDS must be at least %d: fewer do not tell a difference from chance", leastRounds)
	}
	bench := flags.Args()
	switch {
	case *picture == "" && len(bench) == 0:
		bench = []string{"drain"}
	case *picture != "" && len(bench) > 0 && bench[0] != "latency":
		return errors.New("the picture is of latency: nothing else may be measured for it")
	case *picture != "" && len(bench) > 0:
		bench = bench[1:]
	}
	dir, err := os.MkdirTemp("", "posthaste-compare-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	both, err := build(ctx, ".", dir, *base, o.Stderr)
	if err != nil {
		return err
	}
	if *picture != "" {
		w, err := measureRates(ctx, both, rates, bench, *rounds, o.Stderr)
		if err != nil {
			return err
		}
		if err := w.write(*picture); err != nil {
			return err
		}
		if *asJSON {
			return o.JSON(w)
		}
		return w.print(o.Stdout)
	}
	m, err := measure(ctx, both, bench, *rounds, o.Stderr)
	if err != nil {
		return err
	}
	m.compare()
	if *asJSON {
		return o.JSON(m)
	}
	return m.print(o.Stdout)
}

// numbers is a flag with several positive numbers.
type numbers []float64

// String implements flag.Value.
func (n *numbers) String() string { return strings.Trim(fmt.Sprint([]float64(*n)), "[]") }

// Set implements flag.Value.
func (n *numbers) Set(text string) error {
	*n = nil
	for t := range strings.SplitSeq(text, ",") {
		v, err := strconv.ParseFloat(t, 64)
		if err != nil || !(v > 0) {
			return fmt.Errorf("%q is not a number above zero", t)
		}
		*n = append(*n, v)
	}
	return nil
}
