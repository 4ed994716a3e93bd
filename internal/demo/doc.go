// Package demo runs the whole product on servers of its own and shows events arriving.
//
// It starts Postgres and Redis under a temporary folder, the processes of package app, and a consumer. It posts orders
// one by one and then under load while the mode changes. At the end it compares the stream with the placed orders. It
// is a demonstration and a check of the installation: lost or duplicated events are an error.
//
// cmd/posthaste calls Run, once per process.
package demo
