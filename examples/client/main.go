// Command client places one order, exactly once. It may be killed at any point and started again.
//
//	go run ./examples/client -url http://127.0.0.1:8080 -journal order.json \
//	  -user 5b3c1f9e-8a57-4d0e-9d55-2f4a6b1c7e11 -amount 1250 -currency USD
//
// It follows the rules in docs/clients.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("client", flag.ContinueOnError)
	url := fs.String("url", "http://127.0.0.1:8080", "where the API is")
	journal := fs.String("journal", "order.json", "file that keeps the order over a crash")
	token := fs.String("token", os.Getenv("POSTHASTE_API_KEY"), "API key, if the API wants one")
	var o Order
	fs.StringVar(&o.UserID, "user", "", "user id")
	fs.Int64Var(&o.Amount, "amount", 0, "amount in minor units")
	fs.StringVar(&o.Currency, "currency", "USD", "currency")
	patience := fs.Duration("patience", 2*time.Minute, "how long to try")
	if err := fs.Parse(args); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *patience)
	defer cancel()
	c := &Client{URL: *url, Token: *token, HTTP: &http.Client{Timeout: 30 * time.Second}}
	op, err := Open(*journal, o)
	if err != nil {
		return err
	}
	res, err := c.Place(ctx, op)
	var refused *Refused
	if errors.As(err, &refused) && refused.SafeNewKey {
		// The refusal is final, and nothing was ordered: the next run is a new intention.
		return errors.Join(err, op.Done())
	}
	if err != nil {
		return err
	}
	if err := op.Done(); err != nil {
		return err
	}
	fmt.Println(string(res))
	return nil
}
